"""Asks the judge: each question once, within a budget."""

import asyncio
import importlib
import json
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtpo_megatron.config.reward import JudgeConfig
from gtpo_megatron.errors import DataError
from gtpo_megatron.judge.check import CHAT_PATH, classify_path, only_model
from gtpo_megatron.judge.store import JudgeStore, question_key
from gtpo_megatron.untrusted.text import shown

if TYPE_CHECKING:  # it imports openai, which takes seconds
    from openai import AsyncOpenAI


@dataclass(frozen=True, slots=True)
class JudgeAnswer:
    """Answer of the judge.

    Attributes:
        text: text of a chat model; "" of a reward model.
        scores: scores of a reward model, one per label.
        tokens: tokens of question and answer as the endpoint counted them, also where the answer was in the store, so
            that a resumed run has the figures of one that was not.
        is_cut: whether the length limit cut the text.
    """

    text: str = ""
    scores: tuple[float, ...] = ()
    tokens: int = 0
    is_cut: bool = False


class JudgeClient:
    """Asks the judge for one grading process; its client is imported here, and opened by the first question.

    Args:
        config: configuration of the judge.
        store: path of the database of answers; "": nothing is shared with other processes.
    """

    def __init__(self, config: JudgeConfig, store: str = "") -> None:
        self.config = config
        self._store_path = Path(store) if store else None
        if config.url:  # else the first response would pay for the import
            importlib.import_module("gtpo_megatron.judge.endpoint")
        self._client: AsyncOpenAI | None = None
        self._store: JudgeStore | None = None
        self._model = config.model
        self._naming = asyncio.Lock()
        # equal questions that are asked at the same time wait for the first answer
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def asked(self, kind: str, body: dict[str, Any], *, budget: int) -> JudgeAnswer:
        """The answer to a question.

        Args:
            kind: ``chat`` or ``classify``.
            body: body of the request, without the model.
            budget: number of the budget that pays for it.

        Raises:
            DataError: as :meth:`Judge.chat`.
        """
        if not self.config.url:
            raise DataError("no judge is configured: set reward.judge.url, such as http://HOST:8000/v1")
        store = self._opened_store()
        body = {"model": await self._model_name(), **body}
        if not self.config.cache:
            store.take_call(budget)
            return await self._answered(kind, body)
        key = question_key({"url": self.config.url, "kind": kind, **body})
        async with self._locks.setdefault(key, asyncio.Lock()):
            found = store.find(key)
            if found is None:
                store.take_call(budget)
                found = store.keep(key, asdict(await self._answered(kind, body)))
        return JudgeAnswer(**found | {"scores": tuple(found["scores"])})

    async def close(self) -> None:
        """Ends all connections, in the event loop that used them."""
        if self._store is not None:
            self._store.close()
        if self._client is not None:
            await self._client.close()

    def _opened_store(self) -> JudgeStore:
        if self._store is None:
            self._store = JudgeStore(self._store_path, calls_per_step=self.config.calls_per_step)
        return self._store

    async def _ask(self, path: str, body: dict[str, Any] | None = None) -> object:
        from gtpo_megatron.judge.endpoint import ask, open_client

        if self._client is None:
            self._client = open_client(self.config, max_retries=self.config.max_retries)
        return await ask(self._client, path, body)

    async def _answered(self, kind: str, body: dict[str, Any]) -> JudgeAnswer:
        path = classify_path(self.config.url) if kind == "classify" else CHAT_PATH
        reply = await self._ask(path, body)
        return _classified(reply) if kind == "classify" else _said(reply)

    async def _model_name(self) -> str:
        async with self._naming:
            if not self._model:
                self._model = only_model(await self._ask("/models"), self.config.url)
        return self._model


@dataclass(frozen=True, slots=True)
class Judge:
    """The judge of a request.

    Attributes:
        client: client of the grading process.
        budget: number of the budget that pays for the request's questions.
    """

    client: JudgeClient
    budget: int = 0

    @property
    def config(self) -> JudgeConfig:
        """The judge's configuration."""
        return self.client.config

    async def chat(self, messages: Sequence[Mapping[str, str]]) -> JudgeAnswer:
        """Asks a chat model.

        Args:
            messages: chat messages with ``role`` and ``content``.

        Raises:
            DataError: there is no judge, it cannot be reached, it refuses, its budget is used up, or it answers
                something else.
        """
        question = {"messages": [dict(one) for one in messages], **self.config.chat_options}
        return await self.client.asked("chat", question, budget=self.budget)

    async def classify(self, messages: Sequence[Mapping[str, Any]]) -> JudgeAnswer:
        """Asks a model with a classification head, as vLLM serves one, for its scores before any activation.

        Args:
            messages: chat messages with ``role`` and ``content``, perhaps calls of tools; the last one is the response.

        Raises:
            DataError: as :meth:`chat`.
        """
        question = {"messages": [_as_sent(one) for one in messages], "use_activation": False}
        question |= self.config.request_options
        return await self.client.asked("classify", question, budget=self.budget)


def _as_sent(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as OpenAI's interface has it: arguments of calls as a text of JSON, and every call with an id."""
    calls = []
    for number, call in enumerate(message.get("tool_calls", ())):
        function = call["function"] | {"arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}
        calls.append({"id": f"call_{number}"} | call | {"function": function})
    return {**message, "tool_calls": calls} if calls else dict(message)


def _said(reply: object) -> JudgeAnswer:
    try:
        choice = reply["choices"][0]  # type: ignore[index]
        text, ended = _text_of(choice["message"]["content"]), choice.get("finish_reason")
    except (TypeError, KeyError, IndexError, AttributeError):
        text = ended = None
    if text is None and ended == "length":  # all of it was thought, in a field of its own
        text = ""
    if not isinstance(text, str):
        raise DataError(f"the judge answered {shown(reply)}; expected a chat completion with a text")
    return JudgeAnswer(text=text, tokens=_tokens(reply), is_cut=ended == "length")


def _text_of(content: object) -> object:
    """The texts of a content in parts, without what the model thinks, which some send as parts of another type."""
    if not isinstance(content, list):
        return content
    texts = [one if isinstance(one, str) else one.get("text") for one in content if _is_text(one)]
    return "".join(texts) if texts and all(isinstance(one, str) for one in texts) else content


def _is_text(part: object) -> bool:
    return isinstance(part, str) or (isinstance(part, Mapping) and part.get("type", "text") in ("text", "output_text"))


def _classified(reply: object) -> JudgeAnswer:
    try:
        scores = tuple(float(score) for score in reply["data"][0]["probs"])  # type: ignore[index]
    except (TypeError, KeyError, IndexError, ValueError, OverflowError):
        scores = ()
    if not scores or not all(map(math.isfinite, scores)):
        raise DataError(f"the judge answered {shown(reply)}; expected the scores of a classification")
    return JudgeAnswer(scores=scores, tokens=_tokens(reply))


def _tokens(reply: Any) -> int:
    usage = reply.get("usage")
    total = usage.get("total_tokens") if isinstance(usage, dict) else None
    return total if isinstance(total, int) and 0 <= total < 1 << 53 else 0  # which a float, a metric, holds exactly
