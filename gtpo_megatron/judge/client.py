"""Asks the judge: an OpenAI-compatible endpoint, through the ``openai`` client, which retries and backs off."""

import asyncio
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gtpo_megatron.config.grading.judge import JudgeConfig
from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.judge.store import JudgeStore, question_key
from gtpo_megatron.untrusted.text import printable, shown

NO_KEY = "none"
"""Sent in place of a key: the client needs one, and would else read one from the environment."""

ENDPOINT_PATIENCE_S = 30.0
"""Longest wait for an endpoint before a run starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeSetup:
    """A judge as a grading process opens it.

    Attributes:
        config: of the judge.
        store: path of the shared database; "": nothing is shared with other processes.
        responses_per_step: of the run; 0: the budget is for all responses.
    """

    config: JudgeConfig = field(default_factory=JudgeConfig)
    store: str = ""
    responses_per_step: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What the judge said.

    Attributes:
        text: of a chat model; "" of a reward model.
        scores: of a reward model, one per label.
        tokens: that the endpoint counted, of the question and the answer; also of an answer that was known, so that a
            resumed run has the figures of one that was not.
    """

    text: str = ""
    scores: tuple[float, ...] = ()
    tokens: int = 0


class Judge:
    """The judge of one grading process; nothing is opened before the first question.

    Args:
        setup: as in :class:`JudgeSetup`.
    """

    def __init__(self, setup: JudgeSetup) -> None:
        self.config = setup.config
        self._setup = setup
        self._client: Any = None
        self._store: JudgeStore | None = None
        self._model = setup.config.model
        # equal questions that are asked at the same time wait for the first answer
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def chat(self, messages: Sequence[Mapping[str, str]]) -> Answer:
        """Asks a chat model.

        Args:
            messages: with ``role`` and ``content``.

        Raises:
            DataError: there is no judge, it cannot be reached, it refuses, its budget is used up, or it answers
                something else.
        """
        body = {"temperature": self.config.temperature, "max_tokens": self.config.max_tokens}
        return await self._asked("chat", {"messages": [dict(one) for one in messages], **body})

    async def classify(self, messages: Sequence[Mapping[str, str]]) -> Answer:
        """Asks a model with a classification head, as vLLM serves one, for its scores before any activation.

        Args:
            messages: with ``role`` and ``content``; the last one is the response.

        Raises:
            DataError: as :meth:`chat`.
        """
        return await self._asked("classify", {"messages": [dict(one) for one in messages], "use_activation": False})

    async def close(self) -> None:
        """Ends all connections, in the event loop that used them."""
        if self._store is not None:
            self._store.close()
        if self._client is not None:
            await self._client.close()

    async def _asked(self, kind: str, body: dict[str, Any]) -> Answer:
        store, client = self._opened()
        store.note_response()
        question = {"url": self.config.url, "model": self.config.model, "kind": kind, **body}
        key = question_key(question)
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            found = store.find(key) if self.config.cache else None
            if found is not None:
                return Answer(found["text"], tuple(found["scores"]), found["tokens"])
            store.take_call()
            answer = await self._answered(client, kind, body)
            if self.config.cache:
                store.keep(key, asdict(answer))
            return answer

    def _opened(self) -> tuple[JudgeStore, Any]:
        if not self.config.url:
            raise DataError("no judge is configured: set reward.judge.url, such as http://HOST:8000/v1")
        if self._store is None:
            self._store = JudgeStore(
                Path(self._setup.store) if self._setup.store else None,
                responses_per_step=self._setup.responses_per_step,
                calls_per_step=self.config.calls_per_step,
            )
        if self._client is None:
            from openai import AsyncOpenAI

            self._client = AsyncOpenAI(**_client_options(self.config), max_retries=self.config.max_retries)
        return self._store, self._client

    async def _answered(self, client: Any, kind: str, body: dict[str, Any]) -> Answer:
        from openai import OpenAIError

        root = self.config.url.rstrip("/").removesuffix("/v1")
        path = f"{root}/classify" if kind == "classify" else "/chat/completions"
        try:
            model = await self._model_name(client)
            reply = await client.post(path, body={"model": model, **body}, cast_to=object)
        except OpenAIError as error:
            raise DataError(f"judge at {self.config.url}: {_reason(error)}") from error
        except ValueError as error:  # also of an answer that is called JSON and is none
            raise DataError(f"judge at {self.config.url}: {printable(error)}") from error
        return _classified(reply) if kind == "classify" else _said(reply)

    async def _model_name(self, client: Any) -> str:
        if not self._model:
            self._model = only_model(await client.get("/models", cast_to=object), self.config.url)
        return self._model


def check_judge(config: JudgeConfig) -> None:
    """Checks, before a run starts, that the endpoint answers and has the model.

    Raises:
        ConfigError: there is no URL, no key file, no endpoint, or no such model.
    """
    if not config.url:
        raise ConfigError("the reward function asks a judge: set reward.judge.url, such as http://HOST:8000/v1")
    from openai import OpenAI, OpenAIError

    options = _client_options(config) | {"timeout": min(config.timeout_s, ENDPOINT_PATIENCE_S)}
    try:
        with OpenAI(**options, max_retries=min(config.max_retries, 3)) as client:
            models = client.get("/models", cast_to=object)
    except (OpenAIError, ValueError) as error:
        raise ConfigError(f"reward.judge.url={config.url!r}: {_reason(error)}; is the judge running?") from error
    if not config.model:
        only_model(models, config.url)
    elif config.model not in (names := _names(models, config.url)):
        raise ConfigError(f"reward.judge.model={config.model!r}: {config.url} has {printable(', '.join(names))}")


def only_model(models: object, url: str) -> str:
    """The name of the only model of an endpoint.

    Raises:
        ConfigError: it lists several, or no models.
    """
    names = _names(models, url)
    if len(names) != 1:
        raise ConfigError(
            f"reward.judge.model is needed: {url} has {len(names)} models: {printable(', '.join(names[:10]))}"
        )
    return names[0]


def _names(models: object, url: str) -> list[str]:
    """The names in the answer to ``GET /models``."""
    try:
        return [str(one["id"]) for one in models["data"]]  # type: ignore[index]
    except (TypeError, KeyError):
        raise ConfigError(
            f"reward.judge.url={url!r}: GET /models answers {shown(models)}; expected a list of models: does the URL "
            f"end with /v1?"
        ) from None


def _client_options(config: JudgeConfig) -> dict[str, Any]:
    key = NO_KEY
    if config.api_key_file:
        try:
            key = Path(config.api_key_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ConfigError(f"reward.judge.api_key_file={config.api_key_file!r}: {reason}") from error
    return {"base_url": config.url, "api_key": key, "timeout": config.timeout_s}


def _reason(error: Exception) -> str:
    """The exception's text with its cause, which the client's own words leave out: 'Connection error.'"""
    cause = error.__cause__
    return printable(f"{type(error).__name__}: {error}" + (f" ({cause})" if cause is not None and str(cause) else ""))


def _said(reply: object) -> Answer:
    try:
        text = reply["choices"][0]["message"]["content"]  # type: ignore[index]
    except (TypeError, KeyError, IndexError):
        text = None
    if not isinstance(text, str):
        raise DataError(f"the judge answered {shown(reply)}; expected a chat completion with a text")
    return Answer(text=text, tokens=_tokens(reply))


def _classified(reply: object) -> Answer:
    try:
        scores = tuple(float(score) for score in reply["data"][0]["probs"])  # type: ignore[index]
    except (TypeError, KeyError, IndexError, ValueError):
        scores = ()
    if not scores or not all(map(math.isfinite, scores)):
        raise DataError(f"the judge answered {shown(reply)}; expected the scores of a classification")
    return Answer(scores=scores, tokens=_tokens(reply))


def _tokens(reply: Any) -> int:
    usage = reply.get("usage")
    total = usage.get("total_tokens") if isinstance(usage, dict) else None
    return total if isinstance(total, int) else 0
