"""Calls between two processes of the sandbox: one has the tests, the other the program that they test.

Messages are lines of JSON: a request ``{"op": ..., ...}`` is answered by ``{"ok": ...}`` or ``{"raise": ...}``; while
one side waits for an answer it serves the requests of the other. What is in them is encoded by :mod:`.encoding`; what
the tests' operators may ask is in :mod:`.operator_rules`. A collection that a call changes is changed on the side that
passed it, too. Runs inside the sandbox; needs the standard library only.
"""

import json
import os
import sys
import threading

from gtpo_megatron.sandbox.inside.separate_process.encoding import Encoding
from gtpo_megatron.sandbox.inside.separate_process.operator_rules import OperatorRules
from gtpo_megatron.sandbox.inside.separate_process.proxies import OPERATIONS, check_allowed
from gtpo_megatron.sandbox.inside.separate_process.shared_collections import SharedCollections
from gtpo_megatron.sandbox.inside.separate_process.values import INTRUDED, EndedError, Memo

SHARING = ("get", "global")
"""Requests whose answers hold collections of the other side, which both keep alike."""


class ObjectChannel(Encoding, OperatorRules):
    """One side of the connection.

    Args:
        reading: descriptor.
        writing: descriptor.
        is_tests_side: whether this side has the tests, and does not trust the other: of what that was given it may call
            functions, and read and write attributes that have no underscore in front.
    """

    def __init__(self, reading, writing, *, is_tests_side):
        Encoding.__init__(self, SharedCollections(self), is_tests_side=is_tests_side)
        OperatorRules.__init__(self)
        self.reading, self.writing = reading, writing
        self.buffer = bytearray()
        self.lock = threading.RLock()
        self.num_asked = 0
        self.has_ended = False
        self.served = {}
        self.printed = None

    def send(self, message):
        """Writes a message."""
        if self.printed is not None and (printed := self.printed()):
            message["printed"] = printed
        self.shared.put_into(message)
        line = memoryview(json.dumps(message).encode() + b"\n")
        try:
            while line:
                line = line[os.write(self.writing, line) :]
        except OSError as error:
            raise EndedError("it has ended") from error

    def receive(self):
        """The next message."""
        while (end := self.buffer.find(b"\n")) == -1:
            part = os.read(self.reading, 1 << 16)
            if not part:
                raise EndedError("it has ended")
            self.buffer += part
        line = bytes(self.buffer[:end])
        del self.buffer[: end + 1]
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise EndedError(INTRUDED)
        if self.is_tests_side and isinstance(printed := message.get("printed"), dict):
            sys.stdout.write(str(printed.get("stdout", "")))
            sys.stderr.write(str(printed.get("stderr", "")))
        self.shared.take_from(message)
        return message

    def ask(self, op, *, of=0, name="", args=(), kwargs=None):
        """Sends a request and waits for its answer, which is returned or raised."""
        with self.lock:
            self.num_asked += 1
            try:
                return self._answered(op, of, name, args, kwargs)
            except EndedError:  # which tests may catch
                self.has_ended = True
                raise

    def _answered(self, op, of, name, args, kwargs):
        memo = Memo()
        message = {"op": op, "of": of, "name": name, "args": self.encode(list(args), memo)}
        if kwargs:
            message["kwargs"] = self.encode(dict(kwargs), memo)
        if self.is_tests_side and op in SHARING:
            message["share"] = self.shared.begun()
        self.send(message)
        while "op" in (answer := self.receive()):
            self.serve(answer)
        for key, contents in answer.get("changed", {}).items():
            self.fill(memo.objects[int(key)], contents, memo)
        if "raise" in answer:
            raise self._error(answer["raise"])
        found = self.decode(answer["ok"], memo)
        if "share" in message:
            self.shared.add(message["share"], memo)
        return found

    def serve(self, message):
        """Answers a request."""
        memo = Memo()
        answer = {}
        try:
            args = self.decode(message["args"], memo)
            kwargs = self.decode(message["kwargs"], memo) if "kwargs" in message else {}
            memo.watch()
            answer["ok"] = self.encode(self._served(message, args, kwargs), memo)
            if not self.is_tests_side and "share" in message:
                self.shared.add(message["share"], memo)
        except EndedError:
            raise
        except BaseException as error:
            answer = {"raise": self._described_error(error)}
        answer["changed"] = {key: self.contents(memo.objects[key], memo) for key in memo.changed()}
        self.send(answer)

    def _served(self, message, args, kwargs):
        op, name = message["op"], message["name"]
        if op in self.served:
            return self.served[op](name, *args)
        it = self.mine[message["of"]]
        if self.is_tests_side:
            check_allowed(op, name, it, args)
        return OPERATIONS[op](it, name, args, kwargs)
