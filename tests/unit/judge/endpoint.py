"""An HTTP endpoint that says what a test tells it to, request by request."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Reply:
    """Status, content and kind of an answer; after a wait. Without a status the connection is closed.

    ``endless``: a part of it comes every 50 ms, and none is the last.
    """

    status: int | None = 200
    body: str = ""
    kind: str = "application/json"
    wait_s: float = 0.0
    endless: bool = False
    headers: dict[str, str] = field(default_factory=dict)


def says(text: Any, **usage: int) -> Reply:
    """A chat completion."""
    content = {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}], "usage": usage or None}
    return Reply(body=json.dumps(content))


def scores(*values: float) -> Reply:
    """A classification."""
    return Reply(body=json.dumps({"data": [{"index": 0, "probs": values}]}))


BUSY = Reply(status=429, body='{"error": {"message": "slow down"}}', headers={"retry-after-ms": "20"})
BROKEN = Reply(status=500, body="oops", kind="text/plain", headers={"retry-after-ms": "20"})


class Endpoint:
    """Answers in the order of the list, the last one for ever; keeps the requests."""

    def __init__(self, replies: list[Reply]) -> None:
        self.replies = replies
        self.models = ["m"]
        self.models_reply: Reply | None = None
        self.answer: Callable[[dict[str, Any]], str] | None = None
        self.headers: list[dict[str, str]] = []
        self.asked: list[tuple[str, dict[str, Any], str]] = []
        self.most_at_once = self._now = 0
        self.lock = threading.Lock()
        self.url = ""

    def next_reply(self, path: str, body: dict[str, Any], key: str) -> Reply:
        with self.lock:
            self.asked.append((path, body, key))
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]

    def list_of_models(self) -> Reply:
        names = {"object": "list", "data": [{"id": name} for name in self.models]}
        return self.models_reply or Reply(body=json.dumps(names))

    def has_answered(self) -> None:
        with self.lock:
            self._now -= 1


@contextmanager
def serving(*replies: Reply) -> Iterator[Endpoint]:
    endpoint, stopping = Endpoint(list(replies)), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            with suppress(OSError):
                self.send(endpoint.list_of_models())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            endpoint.headers.append({name.lower(): value for name, value in self.headers.items()})
            reply = endpoint.next_reply(self.path, body, self.headers.get("authorization", ""))
            try:
                if endpoint.answer is not None:
                    reply = says(endpoint.answer(body))
                stopping.wait(reply.wait_s)
                self.send(reply)
            except OSError:  # nobody waits for it any more
                self.close_connection = True
            finally:
                endpoint.has_answered()

        def send(self, reply: Reply) -> None:
            if reply.status is None:
                self.close_connection = True
                return
            content = reply.body.encode()
            length = {"transfer-encoding": "chunked"} if reply.endless else {"content-length": str(len(content))}
            self.send_response(reply.status)
            for name, value in {"content-type": reply.kind, **length, **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            while reply.endless and not stopping.wait(0.05):
                self.wfile.write(b"1\r\n \r\n")
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Nothing on the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    endpoint.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield endpoint
    finally:
        stopping.set()
        server.shutdown()
        server.server_close()
        thread.join()
