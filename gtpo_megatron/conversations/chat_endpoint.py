"""The endpoint of a worker's agents, on the loopback or one interface; each episode has a key of its own."""

import hmac
import itertools
import json
import os
import select
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import unquote

import psutil

from gtpo_megatron.conversations.chat_form import chat_answer, chat_request_from, error_body
from gtpo_megatron.conversations.exchange import Asked, Exchange
from gtpo_megatron.conversations.messages import MAX_MESSAGE_BYTES, Message
from gtpo_megatron.conversations.messages_form import messages_answer, messages_request_from
from gtpo_megatron.conversations.responses_form import responses_answer, responses_request_from
from gtpo_megatron.conversations.token_form import token_answer, token_request_from
from gtpo_megatron.errors import ConfigError, GTPOError, StageOrderError
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.untrusted.text import printable, shown

HOST = "127.0.0.1"

READ_LIMIT_S = 60.0
"""Time in which a client must send the next bytes of its request."""

_FORMS: Mapping[str, tuple[Callable[[object], Any], Callable[..., Any]]] = {
    "/v1/chat/completions": (chat_request_from, chat_answer),
    "/v1/responses": (responses_request_from, responses_answer),
    "/v1/messages": (messages_request_from, messages_answer),
    "/inference/v1/generate": (token_request_from, token_answer),
}
"""By path, what reads a request and what writes its answer."""

UNKNOWN_KEY = "the key is not that of an episode under way"

KEYS_KEPT = 4096
"""Keys of episodes that are over, of which late requests are no surprise."""

DISCARDED_BYTES = 64 << 20
"""Bytes of a request that is too long, or a stranger's, that are read, so that its client reads the answer."""


class ChatEndpoint(ThreadingTCPServer):
    """Serves exchanges, in a thread per request.

    Args:
        host: address that it listens on, by which its clients reach this machine.
    """

    daemon_threads = True
    request_queue_size = 1024  # all agents of a worker may begin at once

    def __init__(self, host: str = HOST) -> None:
        super().__init__((host, 0), _Handler)
        self._exchanges: list[Exchange] = []
        self._over: deque[str] = deque(maxlen=KEYS_KEPT)
        self._unknown: deque[None] = deque(maxlen=KEYS_KEPT)
        self.numbers = itertools.count(1)  # of answers
        threading.Thread(target=self.serve_forever, name="endpoint", daemon=True).start()

    @property
    def url(self) -> str:
        """The ``base_url`` of clients."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/v1"

    def open(self) -> Exchange:
        """Makes an exchange, and serves it until it is forgotten."""
        exchange = Exchange()
        self._exchanges.append(exchange)
        return exchange

    def forget(self, exchange: Exchange) -> None:
        """Serves an exchange no longer; its key is no key any more."""
        if exchange in self._exchanges:
            self._exchanges.remove(exchange)
            self._over.append(exchange.key)

    def of_key(self, key: str) -> Exchange | None:
        """The exchange with a key; the time that this takes tells nothing of the keys that there are."""
        given = key.encode()
        found = [one for one in list(self._exchanges) if hmac.compare_digest(one.key.encode(), given)]
        return found[0] if found else None

    def note_unknown(self, key: str) -> None:
        """Counts a request whose episode nobody can tell, unless that is over."""
        if key not in list(self._over):
            self._unknown.append(None)

    def take_unknown(self) -> int:
        """How many there were since the last call."""
        count = 0
        while self._unknown:
            self._unknown.pop()
            count += 1
        return count


_lock = threading.Lock()
_endpoints: list[ChatEndpoint] = []


def the_endpoint(host: str = HOST) -> ChatEndpoint:
    """The endpoint of this process, which serves until the process ends; the first call says where it listens."""
    with _lock:
        if not _endpoints:
            _endpoints.append(ChatEndpoint(host))
        return _endpoints[0]


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface of this machine.

    Raises:
        ConfigError: there is none.
    """
    if interface == "lo":
        return HOST
    addresses = {
        name: one.address
        for name, all_of_it in psutil.net_if_addrs().items()
        for one in all_of_it[::-1]
        if one.family == socket.AF_INET
    }
    if interface not in addresses:
        there = ", ".join(sorted(addresses))
        raise ConfigError(
            f"environment.endpoint_interface={shown(interface)}: {socket.gethostname()} has no such interface with an "
            f"IPv4 address; it has {there}"
        )
    return addresses[interface]


def keep_from_proxies(host: str = HOST) -> None:
    """Lets clients of this process, and of its children, ask the endpoint itself where a proxy is set.

    Before an agent is imported: clients look when they are made.
    """
    for name in ("no_proxy", "NO_PROXY"):
        own = dict.fromkeys((HOST, host))
        hosts = [one for one in os.environ.get(name, "").split(",") if one and one not in own]
        os.environ[name] = ",".join([*hosts, *own])


class _Handler(BaseHTTPRequestHandler):
    """Answers one request, and closes the connection: an agent may forget to."""

    server: ChatEndpoint
    timeout = READ_LIMIT_S

    def do_GET(self) -> None:
        if self._exchange() is None:
            return
        models, _, name = self._place.partition("/v1/models/")
        if self._place == "/v1/models":
            self._say({"object": "list", "data": [_model("policy")]})
        elif name and not models:
            self._say(_model(unquote(name)))
        else:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is no {self._place} here, only /v1/models")

    def do_POST(self) -> None:
        exchange = self.server.of_key(self._key())
        body = self._body(is_kept=exchange is not None)
        if body is None:
            return
        if exchange is None:
            self._refuse(HTTPStatus.UNAUTHORIZED, UNKNOWN_KEY)
            return
        if (form := _FORMS.get(self._place)) is None:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is no {self._place} here, only {' and '.join(_FORMS)}")
            return
        request_from, answer = form
        try:
            request = request_from(parse_json(body, "the request", half_pairs=True))
            if not (turns := self._turns(exchange, request.asked)):
                return
            said = answer(*turns, request=request, number=next(self.server.numbers))
        except StageOrderError as error:
            self._refuse(HTTPStatus.CONFLICT, str(error))
        except GTPOError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except Exception as error:  # noqa: BLE001 - a mistake here, which the agent would take for one of the network's
            traceback.print_exc()
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {printable(error)}")
        else:
            is_stream = isinstance(said, str)
            if not (self._send(HTTPStatus.OK, "text/event-stream", said) if is_stream else self._say(said)):
                exchange.was_lost(turns)

    def _turns(self, exchange: Exchange, asked: Asked) -> list[Message]:
        """As many turns of the policy as are asked for; none if the client goes before the last one."""
        turns = [exchange.ask(asked, has_gone=self._has_gone, is_another=asked.num_answers > 1)]
        for _ in range(1, asked.num_answers):
            if self._has_gone():
                exchange.was_lost(turns)
                return []
            turns.append(exchange.ask(replace(asked, is_enforced=True), has_gone=self._has_gone, is_another=True))
        return turns

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Refuses what is not even looked at: another method, a line that is too long."""
        self._refuse(HTTPStatus(code), message or HTTPStatus(code).phrase)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: an agent's log would have a line per turn."""

    @property
    def _place(self) -> str:
        """The path that is asked for, without a query."""
        return self.path.partition("?")[0].rstrip("/")

    def _exchange(self) -> Exchange | None:
        """The exchange whose key the request has; refuses it without one."""
        found = self.server.of_key(self._key())
        if found is None:
            self._refuse(HTTPStatus.UNAUTHORIZED, UNKNOWN_KEY)
        return found

    def _key(self) -> str:
        """The key of the request; "" without one."""
        headers = getattr(self, "headers", None) or {}  # None of a request whose first line is none
        scheme, _, key = headers.get("Authorization", "").partition(" ")
        # Anthropic's client has a header of its own
        return str(key.strip()) if scheme.lower() == "bearer" else str(headers.get("x-api-key", "").strip())

    def _body(self, *, is_kept: bool) -> bytes | None:
        """The request's body, empty where it is not kept; refuses it without a length, or with too many bytes.

        That of a stranger is read and dropped, so that its client reads the answer and no memory is taken.
        """
        try:
            size = int(self.headers.get("Content-Length", ""))
        except ValueError:
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "the request has no Content-Length")
            return None
        if size < 0:
            self._refuse(HTTPStatus.BAD_REQUEST, f"Content-Length={size}: expected a number of bytes")
            return None
        try:
            if is_kept and size <= MAX_MESSAGE_BYTES:
                return self.rfile.read(size)
            left = min(size, DISCARDED_BYTES)
            while left > 0 and (data := self.rfile.read(min(left, 1 << 16))):
                left -= len(data)
        except TimeoutError:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"nothing came of the rest in {self.timeout:g} s")
            return None
        if not is_kept:
            return b""
        self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{size} bytes, more than {MAX_MESSAGE_BYTES}")
        return None

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        """Says why; the episode is told before the agent, which may end on it."""
        exchange = self.server.of_key(self._key())
        if exchange is None:
            self.server.note_unknown(self._key())
        elif not (status is HTTPStatus.CONFLICT and self._has_gone()):  # a client that asked again
            exchange.refused(why)
        kind = "invalid_request_error" if status is not HTTPStatus.UNAUTHORIZED else "authentication_error"
        self._say(error_body(why, kind=kind), status)

    def _has_gone(self) -> bool:
        """Whether the client has closed the connection: its patience was lost, and nobody reads what is said here."""
        watch = select.poll()
        watch.register(self.connection, select.POLLIN)
        try:
            # another thread may ask too
            return bool(watch.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _say(self, value: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK) -> bool:
        return self._send(status, "application/json", json.dumps(value))

    def _send(self, status: HTTPStatus, kind: str, text: str) -> bool:
        """Sends an answer; whether there was a client to read it."""
        data = text.encode()
        # OpenAI's client asks again after 409 unless it is told not to
        headers = {"Content-Type": kind, "Content-Length": str(len(data)), "x-should-retry": "false"}
        is_read = not self._has_gone()
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            return False
        return is_read


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": ""}
