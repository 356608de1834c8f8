"""The child's side of a pool: a new interpreter that imports the user's code and serves sessions until its parent ends.

How sessions are served is the service's: one call at a time, or many in an event loop.
"""

import json
import os
import socket
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.supervision.worker import limit_memory
from gtpo_megatron.user_code.frames import Frame, FrameKind, FrameReader, packed


class Channel:
    """The worker's end of the pipe.

    Args:
        connection: a socket that blocks.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = FrameReader()

    def fileno(self) -> int:
        """The descriptor, readable when ``receive`` does not wait."""
        return self._connection.fileno()

    def receive(self) -> list[Frame] | None:
        """The frames that are complete with the next bytes; waits for these. None: the pool has gone."""
        try:
            data = self._connection.recv(1 << 18)
        except OSError:
            return None
        return self._reader.feed(data) if data else None

    def send(self, kind: FrameKind, session: int = 0, body: Mapping[str, Any] | None = None) -> None:
        """Sends a frame; the pool reads at all times, so this does not wait for long.

        Raises:
            TypeError, ValueError, RecursionError: JSON does not have the body.
        """
        self.send_json(kind, session, b"" if body is None else json.dumps(body).encode())

    def send_json(self, kind: FrameKind, session: int, body: bytes) -> None:
        """As ``send``, of a body that is JSON already."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # what was printed belongs to what went before
        try:
            self._connection.sendall(packed(kind, session, body))
        except OSError:
            os._exit(1)  # the pool has gone


class Service(Protocol):
    """What a module of a service has: ``load(arguments)`` imports the user's code and returns one."""

    facts: Mapping[str, Any]
    """What the pool must know of the user's code, as JSON has it."""

    def serve(self, channel: Channel) -> None:
        """Answers frames until the pool has gone."""
        ...


def main() -> None:
    """Entry point of the child, whose argument is JSON: a descriptor, the service, its arguments and a memory limit."""
    setup = json.loads(sys.argv[1])
    connection = socket.socket(fileno=setup["descriptor"])
    connection.set_inheritable(False)  # or what the user's code starts would keep the pipe open
    os.register_at_fork(after_in_child=connection.close)  # and so would its forks
    channel = Channel(connection)
    try:
        service: Service = import_module(setup["service"]).load(setup["arguments"])
    except ConfigError as error:
        channel.send(FrameKind.READY, body={"error": str(error)})
        return
    if setup["memory_limit_mib"]:
        limit_memory(setup["memory_limit_mib"])
    channel.send(FrameKind.READY, body={"process_id": os.getpid(), "facts": service.facts})
    service.serve(channel)
