"""The endpoint of a worker's agents: OpenAI's chat completions, on the loopback, each episode with a key of its own."""

import hmac
import itertools
import json
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from gtpo_megatron.conversations.agents import AgentTurns, Exchange
from gtpo_megatron.conversations.chat_form import chat_answer, chat_events, chat_request_from, error_body
from gtpo_megatron.conversations.frames import MAX_FRAME_BYTES
from gtpo_megatron.errors import GTPOError, StageOrderError
from gtpo_megatron.untrusted.json_text import parse_json

HOST = "127.0.0.1"

READ_LIMIT_S = 60.0
"""Time in which a client must send the next bytes of its request."""

DISCARDED_BYTES = 64 << 20
"""Bytes of a request that is too long that are read, so that its client reads the answer."""


class ChatEndpoint(ThreadingTCPServer):
    """Serves exchanges, in a thread per request."""

    daemon_threads = True
    request_queue_size = 1024  # all agents of a worker may begin at once

    def __init__(self) -> None:
        super().__init__((HOST, 0), _Handler)
        self._exchanges: list[Exchange] = []
        self.numbers = itertools.count(1)  # of answers
        threading.Thread(target=self.serve_forever, name="endpoint", daemon=True).start()

    @property
    def url(self) -> str:
        """The ``base_url`` of clients."""
        return f"http://{HOST}:{self.server_address[1]}/v1"

    def open(self) -> tuple[Exchange, str, Callable[[], None]]:
        """An exchange, its URL, and what forgets it."""
        exchange = Exchange()
        self._exchanges.append(exchange)
        return exchange, self.url, partial(self._forget, exchange)

    def of_key(self, key: str) -> Exchange | None:
        """The exchange with a key; the time that this takes tells nothing of the keys that there are."""
        given = key.encode()
        found = [one for one in list(self._exchanges) if hmac.compare_digest(one.key.encode(), given)]
        return found[0] if found else None

    def _forget(self, exchange: Exchange) -> None:
        if exchange in self._exchanges:
            self._exchanges.remove(exchange)


_lock = threading.Lock()
_endpoints: list[ChatEndpoint] = []


def the_endpoint() -> ChatEndpoint:
    """The endpoint of this process, which serves until the process ends."""
    with _lock:
        if not _endpoints:
            _endpoints.append(ChatEndpoint())
            for name in ("no_proxy", "NO_PROXY"):  # a cluster's proxy would not find this machine's loopback
                os.environ[name] = ",".join(filter(None, (os.environ.get(name), HOST)))
        return _endpoints[0]


def agent_turns(agent: Callable[..., Any]) -> AgentTurns:
    """The environment of an episode with an agent."""
    return AgentTurns(agent, the_endpoint().open)


class _Handler(BaseHTTPRequestHandler):
    """Answers one request, and closes the connection: an agent may forget to."""

    server: ChatEndpoint
    timeout = READ_LIMIT_S

    def do_GET(self) -> None:
        if self._exchange() is None:
            return
        if self.path.rstrip("/") == "/v1/models":
            self._say({"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": ""}]})
        else:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is no {self.path} here, only /v1/chat/completions")

    def do_POST(self) -> None:
        body = self._body()
        if body is None or (exchange := self._exchange()) is None:
            return
        if self.path.rstrip("/") != "/v1/chat/completions":
            self._refuse(HTTPStatus.NOT_FOUND, f"there is no {self.path} here, only /v1/chat/completions")
            return
        try:
            request = chat_request_from(parse_json(body, "the request", half_pairs=True))
            turn = exchange.ask(request.asked)
        except StageOrderError as error:
            self._refuse(HTTPStatus.CONFLICT, str(error))
        except GTPOError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        else:
            number = next(self.server.numbers)
            if request.is_streamed:
                self._send(HTTPStatus.OK, "text/event-stream", chat_events(turn, request, number=number))
            else:
                self._say(chat_answer(turn, request, number=number))

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: an agent's log would have a line per turn."""

    def _exchange(self) -> Exchange | None:
        """The exchange whose key the request has; refuses it without one."""
        scheme, _, key = self.headers.get("Authorization", "").partition(" ")
        found = self.server.of_key(key.strip()) if scheme.lower() == "bearer" else None
        if found is None:
            self._refuse(HTTPStatus.UNAUTHORIZED, "the key is not that of an episode under way")
        return found

    def _body(self) -> bytes | None:
        """The request's body; refuses it without a length, or with too many bytes."""
        try:
            size = int(self.headers.get("Content-Length", ""))
        except ValueError:
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "the request has no Content-Length")
            return None
        if 0 <= size <= MAX_FRAME_BYTES:
            return self.rfile.read(size)
        left = min(size, DISCARDED_BYTES)
        while left > 0 and (data := self.rfile.read(min(left, 1 << 16))):
            left -= len(data)
        self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{size} bytes, more than {MAX_FRAME_BYTES}")
        return None

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        kind = "invalid_request_error" if status is not HTTPStatus.UNAUTHORIZED else "authentication_error"
        self._say(error_body(why, kind=kind), status)

    def _say(self, value: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send(status, "application/json", json.dumps(value))

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        data = text.encode()
        try:
            self.send_response(status)
            # OpenAI's client asks again after 409 unless it is told not to
            for name, value in {
                "Content-Type": kind,
                "Content-Length": str(len(data)),
                "x-should-retry": "false",
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            pass  # the client has gone
