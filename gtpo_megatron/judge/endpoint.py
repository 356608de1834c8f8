"""Sends requests to a judge's endpoint, and reads a limited part of each answer for a limited time."""

import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAIError

from gtpo_megatron.config.reward import JudgeConfig
from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.untrusted.text import printable, read_text

MAX_ANSWER_BYTES = 8 << 20
"""Size limit of an answer; a list of 10,000 models has 2 MB."""

MAX_REASON = 300
"""Characters of an endpoint's error that are shown; some answer with a whole page."""

_KEY = re.compile(r"[!-~]{1,4096}")

_SENT = frozenset({"host", "accept", "connection", "content-type", "content-length", "user-agent"})
"""Headers that go to an endpoint, besides the key. The client adds others, some of them from the environment."""

_HERE = ("127.0.0.1", "::1", "localhost")


def open_client(config: JudgeConfig, *, max_retries: int) -> AsyncOpenAI:
    """The client of a judge, which asks again after failures; for use in one event loop.

    Nobody trusts the endpoint: no redirect is followed, and neither the environment's keys nor its headers are sent.
    One on this machine is not asked through a proxy.

    Args:
        config: configuration of the judge.
        max_retries: further attempts.

    Raises:
        ConfigError: the URL or the key file cannot be used.
    """
    key = _key(config)

    async def only_ours(request: httpx.Request) -> None:
        for name in set(request.headers) - _SENT:
            del request.headers[name]
        request.headers["accept-encoding"] = "identity"
        if key:
            request.headers["authorization"] = f"Bearer {key}"

    async def limited(response: httpx.Response) -> None:
        if response.has_redirect_location:
            raise RefusedAnswerError(f"it redirects to {response.headers['location']}, which is not followed")
        if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
            raise RefusedAnswerError(f"its answer is compressed ({encoding}), which was not asked for")
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _LimitedStream(response.stream, limit_s=config.timeout_s)

    try:
        is_here = httpx.URL(config.url).host in _HERE
    except httpx.InvalidURL as error:
        raise ConfigError(f"reward.judge.url={config.url!r}: {printable(error)}") from error
    return AsyncOpenAI(
        base_url=config.url.rstrip("/"),
        api_key="none",  # without one, the client takes one from the environment
        timeout=config.timeout_s,
        max_retries=max_retries,
        http_client=DefaultAsyncHttpxClient(
            follow_redirects=False,
            trust_env=not is_here,
            event_hooks={"request": [only_ours], "response": [limited]},
        ),
    )


async def ask(client: AsyncOpenAI, path: str, body: dict[str, Any] | None = None) -> object:
    """Sends a request and returns its answer; JSON as its values, anything else as text.

    Args:
        client: client of the judge.
        path: below the base URL, or a whole URL.
        body: body of a POST; None: a GET.

    Raises:
        DataError: the endpoint cannot be reached, refuses, or sends what is called JSON and is none.
    """
    try:
        if body is None:
            return await client.get(path, cast_to=object)
        return await client.post(path, body=body, cast_to=object)
    except (OpenAIError, ValueError, RecursionError) as error:
        raise DataError(f"judge at {str(client.base_url).rstrip('/')}: {_reason(error)}") from error


class RefusedAnswerError(OpenAIError):
    """An answer that is not read; the client does not ask again."""


class _LimitedStream(httpx.AsyncByteStream):
    """The bytes of an answer, as far as ``MAX_ANSWER_BYTES`` and within ``limit_s`` seconds."""

    def __init__(self, stream: httpx.AsyncByteStream, *, limit_s: float) -> None:
        self._stream, self._limit_s = stream, limit_s

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes, deadline = 0, time.monotonic() + self._limit_s
        async for part in self._stream:
            num_bytes += len(part)
            if num_bytes > MAX_ANSWER_BYTES:
                raise RefusedAnswerError(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
            if time.monotonic() > deadline:
                raise httpx.ReadTimeout(f"no whole answer within {self._limit_s:g} s")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


def _key(config: JudgeConfig) -> str:
    """The content of the key file; "" if there is none. Messages do not show it."""
    if not config.api_key_file:
        return ""
    try:
        key = read_text(Path(config.api_key_file), error=ConfigError).strip()
    except ConfigError as error:
        raise ConfigError(f"reward.judge.api_key_file={error}") from error
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"reward.judge.api_key_file={config.api_key_file!r}: holds no key; expected one word of ASCII letters, "
            f"digits and signs"
        )
    return key


def _reason(error: Exception) -> str:
    """The exception's text with its first cause, which the client's own words leave out: 'Connection error.'"""
    cause, first = _before(error), ""
    while cause is not None:
        first = str(cause) or first
        cause = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else _before(cause)
    text = printable(f"{type(error).__name__}: {error}" + (f" ({first})" if first else ""))
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."


def _before(error: BaseException) -> BaseException | None:
    return error.__cause__ or error.__context__
