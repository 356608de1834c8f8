"""Sends requests to a judge's endpoint, and reads a limited part of each answer for a limited time."""

import asyncio
import ipaddress
import re
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAIError

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


class Endpoint:
    """The ``openai`` client of a judge, which asks again after failures; for use in one event loop.

    Args:
        config: of the judge.
        max_retries: further attempts.

    Raises:
        ConfigError: the URL or the key file cannot be used.
    """

    def __init__(self, config: JudgeConfig, *, max_retries: int) -> None:
        try:
            connection = JudgeConnection(config.url, key=_key(config), limit_s=config.timeout_s)
        except httpx.InvalidURL as error:
            raise ConfigError(f"reward.judge.url={config.url!r}: {printable(error)}") from error
        self._url = config.url
        self._client = AsyncOpenAI(
            base_url=config.url.rstrip("/"),
            api_key="none",  # the connection sends the key; without one, the client takes one from the environment
            timeout=config.timeout_s,
            max_retries=max_retries,
            http_client=connection,
        )

    async def asked(self, path: str, body: dict[str, Any] | None = None) -> object:
        """Sends a request and returns its answer; JSON as its values, anything else as text.

        Args:
            path: below the base URL, or a whole URL.
            body: what is posted; None: nothing.

        Raises:
            DataError: the endpoint cannot be reached, refuses, or sends what is called JSON and is none.
        """
        try:
            if body is None:
                return await self._client.get(path, cast_to=object)
            return await self._client.post(path, body=body, cast_to=object)
        except (OpenAIError, ValueError, RecursionError) as error:
            raise DataError(f"judge at {self._url}: {_reason(error)}") from error

    async def close(self) -> None:
        """Ends all connections."""
        await self._client.close()


class RefusedAnswerError(OpenAIError):
    """An answer that is not read; the client does not ask again."""


class JudgeConnection(httpx.AsyncClient):
    """An HTTP client for endpoints that nobody trusts: it follows no redirect, and reads no more than it must.

    An endpoint on this machine is never asked through a proxy; for others, the proxies and certificates of the
    environment count, as for every HTTP client.

    Args:
        url: of the endpoint.
        key: sent as the bearer's token; "": none.
        limit_s: of a request, from the connection to the last byte of the answer.

    Raises:
        httpx.InvalidURL: the URL is none.
    """

    def __init__(self, url: str, *, key: str, limit_s: float) -> None:
        super().__init__(
            timeout=limit_s,
            follow_redirects=False,
            trust_env=not _is_here(httpx.URL(url).host),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=100),
        )
        self._key = key
        self._limit_s = limit_s

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        """Sends a request, and reads the answer whole.

        Raises:
            RefusedAnswerError: it is a redirect, compressed, or larger than ``MAX_ANSWER_BYTES``.
            httpx.HTTPError: there is none within the limit.
        """
        for name in set(request.headers) - _SENT:
            del request.headers[name]
        request.headers["accept-encoding"] = "identity"
        if self._key:
            request.headers["authorization"] = f"Bearer {self._key}"
        try:
            async with asyncio.timeout(self._limit_s):
                response = await super().send(request, **options | {"stream": True})
                try:
                    content = await _read(response)
                finally:
                    await response.aclose()
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"no whole answer within {self._limit_s:g} s", request=request) from error
        headers = [(name, value) for name, value in response.headers.multi_items() if name != "transfer-encoding"]
        return httpx.Response(response.status_code, headers=headers, content=content, request=request)


async def _read(response: httpx.Response) -> bytes:
    if response.has_redirect_location:
        raise RefusedAnswerError(f"it redirects to {response.headers['location']}, which is not followed")
    if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
        raise RefusedAnswerError(f"its answer is compressed ({encoding}), which was not asked for")
    content = bytearray()
    async for part in response.aiter_raw():
        content += part
        if len(content) > MAX_ANSWER_BYTES:
            raise RefusedAnswerError(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
    return bytes(content)


def _is_here(host: str) -> bool:
    """Whether a host is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


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
