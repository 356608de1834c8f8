"""Asks the judge: each question once, within a budget."""

import asyncio
import importlib
import json
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtpo_megatron.config.reward import JudgeConfig
from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.judge.check import CHAT_PATH, check_question, classify_path
from gtpo_megatron.judge.store import JudgeStore, question_key
from gtpo_megatron.untrusted.text import shown

if TYPE_CHECKING:  # it imports openai, which takes seconds
    from gtpo_megatron.judge.endpoint import Endpoint

ENDPOINT_PATIENCE_S = 30.0
"""Longest wait for an endpoint before a run starts, retries included."""

SHOWN_MODELS = 10
"""Names in a message; an endpoint may list thousands."""

MOST_TOKENS = 1_000_000
"""Largest plausible number of tokens of a call; a larger one is taken as not counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeSetup:
    """A judge as a grading process opens it.

    Attributes:
        config: of the judge.
        store: path of the shared database; "": nothing is shared with other processes.
    """

    config: JudgeConfig = field(default_factory=JudgeConfig)
    store: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of the judge.

    Attributes:
        text: of a chat model; "" of a reward model.
        scores: of a reward model, one per label.
        tokens: that the endpoint counted, of the question and the answer; also of an answer that was known, so that a
            resumed run has the figures of one that was not.
        is_cut: the length limit cut the text.
    """

    text: str = ""
    scores: tuple[float, ...] = ()
    tokens: int = 0
    is_cut: bool = False


class JudgeClient:
    """Asks the judge for one grading process; its client is imported here, and opened by the first question.

    Args:
        setup: as in :class:`JudgeSetup`.
    """

    def __init__(self, setup: JudgeSetup) -> None:
        self.config = setup.config
        self._setup = setup
        if setup.config.url:  # else the first response would pay for the import
            importlib.import_module("gtpo_megatron.judge.endpoint")
        self._endpoint: Endpoint | None = None
        self._store: JudgeStore | None = None
        self._model = setup.config.model
        self._naming = asyncio.Lock()
        # equal questions that are asked at the same time wait for the first answer
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def asked(self, kind: str, body: dict[str, Any], *, budget: int) -> Answer:
        """The answer to a question.

        Args:
            kind: ``chat`` or ``classify``.
            body: of the request, without the model.
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
        return Answer(**found | {"scores": tuple(found["scores"])})

    async def close(self) -> None:
        """Ends all connections, in the event loop that used them."""
        if self._store is not None:
            self._store.close()
        if self._endpoint is not None:
            await self._endpoint.close()

    def _opened_store(self) -> JudgeStore:
        if self._store is None:
            path = Path(self._setup.store) if self._setup.store else None
            self._store = JudgeStore(path, calls_per_step=self.config.calls_per_step)
        return self._store

    def _opened_endpoint(self) -> "Endpoint":
        if self._endpoint is None:
            self._endpoint = _endpoint(self.config, max_retries=self.config.max_retries)
        return self._endpoint

    async def _answered(self, kind: str, body: dict[str, Any]) -> Answer:
        path = classify_path(self.config.url) if kind == "classify" else CHAT_PATH
        reply = await self._opened_endpoint().asked(path, body)
        return _classified(reply) if kind == "classify" else _said(reply)

    async def _model_name(self) -> str:
        async with self._naming:
            if not self._model:
                self._model = only_model(await self._opened_endpoint().asked("/models"), self.config.url)
        return self._model


@dataclass(frozen=True, slots=True)
class Judge:
    """The judge of a request.

    Attributes:
        client: of the grading process.
        budget: number of the budget that pays for the request's questions.
    """

    client: JudgeClient
    budget: int = 0

    @property
    def config(self) -> JudgeConfig:
        """The judge's configuration."""
        return self.client.config

    async def chat(self, messages: Sequence[Mapping[str, str]]) -> Answer:
        """Asks a chat model.

        Args:
            messages: with ``role`` and ``content``.

        Raises:
            DataError: there is no judge, it cannot be reached, it refuses, its budget is used up, or it answers
                something else.
        """
        question = {"messages": [dict(one) for one in messages], **self.config.chat_options}
        return await self.client.asked("chat", question, budget=self.budget)

    async def classify(self, messages: Sequence[Mapping[str, Any]]) -> Answer:
        """Asks a model with a classification head, as vLLM serves one, for its scores before any activation.

        Args:
            messages: with ``role`` and ``content``, perhaps calls of tools; the last one is the response.

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


def check_judge(config: JudgeConfig) -> str:
    """Checks, before a run starts, that the endpoint has the model and answers one small question as a run asks it.

    Returns:
        The model's name.

    Raises:
        ConfigError: there is no URL, no key file, no endpoint, or no such model; or it refuses an option, which the
            message names.
    """
    if not config.url:
        raise ConfigError("the reward function asks a judge: set reward.judge.url, such as http://HOST:8000/v1")
    return asyncio.run(_checked(config))


async def _checked(config: JudgeConfig) -> str:
    endpoint = _endpoint(config, max_retries=min(config.max_retries, 3))
    try:
        model = _model_of(await _models(endpoint, config), config)
        await check_question(endpoint, config, model, patience_s=max(ENDPOINT_PATIENCE_S, config.timeout_s))
        return model
    finally:
        await endpoint.close()


def _model_of(models: object, config: JudgeConfig) -> str:
    if not config.model:
        return only_model(models, config.url)
    if config.model not in (names := _names(models, config.url)):
        raise ConfigError(f"reward.judge.model={config.model!r}: {config.url} has {_listed(names)}")
    return config.model


async def _models(endpoint: "Endpoint", config: JudgeConfig) -> object:
    try:
        async with asyncio.timeout(ENDPOINT_PATIENCE_S):
            return await endpoint.asked("/models")
    except TimeoutError as error:
        raise ConfigError(
            f"reward.judge.url={config.url!r}: does not answer within {ENDPOINT_PATIENCE_S:g} s; is the judge running?"
        ) from error
    except DataError as error:
        raise ConfigError(f"reward.judge.url: {error}; is the judge running?") from error


def _endpoint(config: JudgeConfig, *, max_retries: int) -> "Endpoint":
    from gtpo_megatron.judge.endpoint import Endpoint

    return Endpoint(config, max_retries=max_retries)


def only_model(models: object, url: str) -> str:
    """The name of the only model of an endpoint.

    Raises:
        ConfigError: it lists several, or no models.
    """
    names = _names(models, url)
    if len(names) != 1:
        raise ConfigError(f"reward.judge.model is needed: {url} has {_listed(names)}")
    return names[0]


def _listed(names: Sequence[str]) -> str:
    first = ", ".join(shown(name) for name in names[:SHOWN_MODELS])
    more = f" and {len(names) - SHOWN_MODELS} more" if len(names) > SHOWN_MODELS else ""
    return f"{first}{more}" if names else "no models"


def _names(models: object, url: str) -> list[str]:
    """The names in the answer to ``GET /models``."""
    try:
        return [str(one["id"]) for one in models["data"]]  # type: ignore[index]
    except (TypeError, KeyError):
        raise ConfigError(
            f"reward.judge.url={url!r}: GET /models answers {shown(models)}; expected a list of models: does the URL "
            f"end with /v1?"
        ) from None


def _said(reply: object) -> Answer:
    try:
        choice = reply["choices"][0]  # type: ignore[index]
        text, ended = _text_of(choice["message"]["content"]), choice.get("finish_reason")
    except (TypeError, KeyError, IndexError, AttributeError):
        text = ended = None
    if text is None and ended == "length":  # all of it was thought, in a field of its own
        text = ""
    if not isinstance(text, str):
        raise DataError(f"the judge answered {shown(reply)}; expected a chat completion with a text")
    return Answer(text=text, tokens=_tokens(reply), is_cut=ended == "length")


def _text_of(content: object) -> object:
    """The texts of a content in parts, without what the model thinks, which some send as parts of another type."""
    if not isinstance(content, list):
        return content
    texts = [one if isinstance(one, str) else one.get("text") for one in content if _is_text(one)]
    return "".join(texts) if texts and all(isinstance(one, str) for one in texts) else content


def _is_text(part: object) -> bool:
    return isinstance(part, str) or (isinstance(part, Mapping) and part.get("type", "text") in ("text", "output_text"))


def _classified(reply: object) -> Answer:
    try:
        scores = tuple(float(score) for score in reply["data"][0]["probs"])  # type: ignore[index]
    except (TypeError, KeyError, IndexError, ValueError, OverflowError):
        scores = ()
    if not scores or not all(map(math.isfinite, scores)):
        raise DataError(f"the judge answered {shown(reply)}; expected the scores of a classification")
    return Answer(scores=scores, tokens=_tokens(reply))


def _tokens(reply: Any) -> int:
    usage = reply.get("usage")
    total = usage.get("total_tokens") if isinstance(usage, dict) else None
    return total if isinstance(total, int) and 0 <= total <= MOST_TOKENS else 0
