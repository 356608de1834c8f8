"""Asks a judge before a run: which models it has, and one small question with the options of the run's own."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gtpo_megatron.config.reward import JudgeConfig
from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.untrusted.text import printable, shown

if TYPE_CHECKING:  # it imports openai, which takes seconds
    from openai import AsyncOpenAI

ENDPOINT_PATIENCE_S = 30.0
"""Longest wait for an endpoint before a run starts, retries included."""

SHOWN_MODELS = 10
"""Names in a message; an endpoint may list thousands."""

CHAT_PATH = "/chat/completions"

QUESTION = [{"role": "user", "content": "Say yes."}]

LIMIT_NAMES = ("max_tokens", "max_completion_tokens")

SMALL_LIMIT = 16
"""Most tokens of the answer to the check's question; endpoints may refuse fewer."""

MAX_SAID = 300
"""Characters of what an endpoint said that are shown."""

_REFUSED = (400, 422)
"""Statuses of a request with something in it that the endpoint does not take."""

_NO_CHAT = (404, 405, 501)
"""Statuses of an endpoint that has no chat completions, such as one of a reward model."""

_UNKNOWN = re.compile(
    r"(?i)un(?:supported|recogni[sz]ed|known|expected)|\b(?:not|n't)\s+(?:support|tak|accept|permit|allow|recogni)|"
    r"no longer|deprecated|\bextra\b|\binstead\b|forbidden|cannot be (?:used|set|sent|specified)|"
    r"\binvalid (?:param|arg|field|key|name)"
)
"""An endpoint says that it has no such key, and not that its value is too large or too small."""


def classify_path(url: str) -> str:
    """Where a model with a classification head is asked, which is beside the versioned interface."""
    return f"{url.rstrip('/').removesuffix('/v1')}/classify"


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
    from gtpo_megatron.judge.endpoint import open_client

    async with open_client(config, max_retries=min(config.max_retries, 3)) as client:
        model = _model_of(await _models(client, config), config)
        await check_question(client, config, model, patience_s=max(ENDPOINT_PATIENCE_S, config.timeout_s))
    return model


def _model_of(models: object, config: JudgeConfig) -> str:
    if not config.model:
        return only_model(models, config.url)
    if config.model not in (names := _names(models, config.url)):
        raise ConfigError(f"reward.judge.model={config.model!r}: {config.url} has {_listed(names)}")
    return config.model


async def _models(client: "AsyncOpenAI", config: JudgeConfig) -> object:
    from gtpo_megatron.judge.endpoint import ask

    try:
        async with asyncio.timeout(ENDPOINT_PATIENCE_S):
            return await ask(client, "/models")
    except TimeoutError as error:
        raise ConfigError(
            f"reward.judge.url={config.url!r}: does not answer within {ENDPOINT_PATIENCE_S:g} s; is the judge running?"
        ) from error
    except DataError as error:
        raise ConfigError(f"reward.judge.url: {error}; is the judge running?") from error


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


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why an endpoint refuses: its status (0: none), which key it names first ("": none), and what it said."""

    status: int
    key: str
    said: str

    @property
    def is_of_size(self) -> bool:
        """It is about a number of tokens, and not about a key that it does not know, or has by another name."""
        has_both = all(re.search(rf"\b{name}\b", self.said) for name in LIMIT_NAMES)
        return "token" in self.said.lower() and not has_both and not _UNKNOWN.search(self.said)


async def check_question(client: "AsyncOpenAI", config: JudgeConfig, model: str, *, patience_s: float) -> None:
    """Asks a chat model one question of a few tokens, or a reward model for one score.

    A limit of tokens that is too small for a model that thinks is no failure: an answer that is cut is one. What is
    refused costs nothing, so that an endpoint that refuses so small a limit is asked again with the real one.

    Raises:
        ConfigError: it refuses the question, or answers something else, or nothing within the limit.
    """
    limit = config.token_limit_name
    body = {"model": model, "messages": QUESTION, **config.chat_options}
    small = min(SMALL_LIMIT, config.max_tokens)
    refusal = await _refusal(client, CHAT_PATH, body | {limit: small}, patience_s)
    if refusal is not None and refusal.status in _REFUSED and refusal.is_of_size and small < config.max_tokens:
        refusal = await _refusal(client, CHAT_PATH, body, patience_s)
    if refusal is not None and (refusal.status in _NO_CHAT or "support Chat Completions" in refusal.said):
        asked = {"model": model, "messages": QUESTION, "use_activation": False, **config.request_options}
        if await _refusal(client, classify_path(config.url), asked, patience_s) is None:
            return
    if refusal is not None:
        raise ConfigError(_advice(refusal, config))


async def _refusal(client: "AsyncOpenAI", path: str, body: dict[str, Any], patience_s: float) -> _Refusal | None:
    """Why a question is refused; None if it is answered."""
    from gtpo_megatron.judge.endpoint import ask

    options = [key for key in body if key not in ("model", "messages", "use_activation")]
    try:
        async with asyncio.timeout(patience_s):
            reply = await ask(client, path, body)
    except TimeoutError:
        return _Refusal(0, "", f"does not answer a small question within {patience_s:g} s")
    except DataError as error:
        cause = error.__cause__
        status, told = getattr(cause, "status_code", 0), getattr(cause, "body", None)
        return _Refusal(status, _named_key(told, options), _said(told) or str(error))
    answers = reply.get("data" if path.endswith("/classify") else "choices") if isinstance(reply, Mapping) else None
    if isinstance(answers, Sequence) and answers and not isinstance(answers, str):
        return None
    told = reply.get("error") if isinstance(reply, Mapping) else None  # as some gateways refuse, with status 200
    if told:
        return _Refusal(_REFUSED[0], _named_key(told, options), _said(told) or shown(told))
    return _Refusal(0, "", f"answers {shown(reply)}; expected a chat completion")


def _said(told: object) -> str:
    """The message of an error in the forms of OpenAI and of FastAPI; "" if it has another one."""
    if not isinstance(told, Mapping):
        return told if isinstance(told, str) else ""
    details = told.get("detail")
    listed = details if isinstance(details, list) else []
    texts = [f"{'.'.join(_place(one))}: {one.get('msg')}" for one in listed if isinstance(one, Mapping)]
    message = told.get("message") or details
    return "; ".join(texts) or (message if isinstance(message, str) else "")


def _place(detail: Mapping[str, Any]) -> list[str]:
    place = detail.get("loc")
    return [str(one) for one in place] if isinstance(place, list) else []


def _named_key(told: object, options: Sequence[str]) -> str:
    """The option that an error is about: by its field ``param``, or the one that its message names first."""
    param = told.get("param") if isinstance(told, Mapping) else None
    for text in (param, _said(told)):
        places = (
            {key: re.search(rf"(?<!\w){re.escape(key)}(?!\w)", text) for key in options}
            if isinstance(text, str)
            else {}
        )
        found = {key: place.start() for key, place in places.items() if place}
        if found:
            return min(found, key=lambda key: found[key])
    return ""


def _advice(refusal: _Refusal, config: JudgeConfig) -> str:
    """One line: which option the endpoint does not take, what to set, and what it said."""
    said = printable(refusal.said)
    said = said if len(said) <= MAX_SAID else f"{said[:MAX_SAID]}..."
    if refusal.status not in _REFUSED:
        return f"reward.judge.url={config.url!r}: {said}"
    if refusal.key in LIMIT_NAMES and not refusal.is_of_size:
        other = LIMIT_NAMES[1 - LIMIT_NAMES.index(refusal.key)]
        todo = f"set --reward.judge.token-limit-name {other}"
    elif refusal.key in LIMIT_NAMES:
        todo = f"set another --reward.judge.max-tokens than {config.max_tokens}"
    elif refusal.key == "temperature":
        todo = f"set --reward.judge.temperature None, which sends none, or another one than {config.temperature:g}"
    elif refusal.key:
        todo = f"change {refusal.key!r} in --reward.judge.request-options, or leave it out"
    else:
        return (
            f"reward.judge.url={config.url!r} refuses a small question: {said}; what is sent with it is set by "
            f"--reward.judge.temperature, max-tokens, token-limit-name and request-options"
        )
    return f"reward.judge.url={config.url!r} does not take {refusal.key} as it is sent: {todo}; it says: {said}"
