"""Calls between two processes of the sandbox: one has the tests, the other the program that they test.

Numbers, texts and Python's own collections cross by value, and only as such: what arrives is an exact ``int``, ``str``,
``list``. Everything else stays where it is, and the other side has a *remote*, whose attributes, calls and operators
are requests. A collection that a call changes is changed on the side that passed it, too.

Messages are lines of JSON: a request ``{"op": ..., ...}`` is answered by ``{"ok": ...}`` or ``{"raise": ...}``; while
one side waits for an answer it serves the requests of the other. Runs inside the sandbox; needs the standard library
only.
"""

import collections
import contextlib
import json
import os
import sys
import threading
import types
import weakref
from collections.abc import Coroutine

from gtpo_megatron.sandbox.inside.lent import Loans
from gtpo_megatron.sandbox.inside.operators import Operators
from gtpo_megatron.sandbox.inside.remotes import (
    OPERATIONS,
    SPECIALS,
    Awaited,
    Mirror,
    Remote,
    attribute_of_error,
    check_allowed,
    is_remote,
    special,
)
from gtpo_megatron.sandbox.inside.values import (
    EXACT,
    FROM_TEXT,
    IMMUTABLE,
    KINDS,
    LARGEST,
    MUTABLE,
    PLAIN_BASES,
    TO_TEXT,
    VIEWS,
    EndedError,
    Memo,
    array_of,
    builtin_type,
    extra_of,
    is_builtin,
    known_error,
    made_empty,
    place_of,
    plain_of,
    stdlib_module,
)

DETAIL_BYTES = 2000
"""Bytes kept of an exception's text."""
LENDING = ("get", "global")
"""Requests whose answers hold collections of the other side, which both keep alike."""
LOSSY = ("mine", "error", "array", "scalar")
"""What may be decoded to something that is not the same when it goes back."""


class ProgramExit(SystemExit):
    """The program asked to leave."""


class Link(Operators):
    """One side of the connection.

    Args:
        reading: descriptor.
        writing: descriptor.
        is_guarded: the other side is not trusted: of what it was given it may call functions, and read and write
            attributes of objects that have no underscore in front.
    """

    def __init__(self, reading, writing, *, is_guarded):
        super().__init__()
        self.reading, self.writing, self.is_guarded = reading, writing, is_guarded
        self.loans = Loans(self)
        self.buffer = bytearray()
        self.lock = threading.RLock()
        self.mine, self.keys, self.described = {}, {}, set()
        self.classes, self.theirs = {}, weakref.WeakValueDictionary()
        self.raised_here, self.raised_there = {}, {}
        self.num_asked = 0
        self.has_ended = False
        self.served = {}
        self.printed = None

    # ------------------------------------------------------------------------------------------------------- messages

    def send(self, message):
        """Writes a message."""
        if self.printed is not None and (printed := self.printed()):
            message["printed"] = printed
        self.loans.put_into(message)
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
            raise EndedError("it wrote into its connection")
        if self.is_guarded and isinstance(printed := message.get("printed"), dict):
            sys.stdout.write(str(printed.get("stdout", "")))
            sys.stderr.write(str(printed.get("stderr", "")))
        self.loans.take_from(message)
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
        if self.is_guarded and op in LENDING:
            message["lend"] = self.loans.begun()
        self.send(message)
        while "op" in (answer := self.receive()):
            self.serve(answer)
        for key, contents in answer.get("changed", {}).items():
            self.fill(memo.objects[int(key)], contents, memo)
        if "raise" in answer:
            raise self._error(answer["raise"])
        found = self.decode(answer["ok"], memo)
        if "lend" in message:
            self.loans.add(message["lend"], memo)
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
            if not self.is_guarded and "lend" in message:
                self.loans.add(message["lend"], memo)
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
        if self.is_guarded:
            check_allowed(op, name, it, args)
        return OPERATIONS[op](it, name, args, kwargs)

    # -------------------------------------------------------------------------------------------------------- remotes

    def is_theirs(self, error):
        """Whether the other side raised an exception."""
        return error is None or id(error) in self.raised_there

    def export(self, value):
        """The number by which the other side knows an object of this one."""
        key = self.keys.get(id(value))
        if key is None:
            key = self.keys[id(value)] = len(self.mine) + 1
            self.mine[key] = value
        return key

    # --------------------------------------------------------------------------------------------------------- values

    def encode(self, value, memo):
        """A value as JSON."""
        kind = type(value)
        if kind in EXACT:
            return value
        if kind is int:
            return value if -LARGEST < value < LARGEST else {"t": "int", "v": hex(value)}
        if is_remote(value):
            return {"t": "yours", "v": value._key if isinstance(value, Mirror) else value._number}
        if id(value) in memo.keys:
            return {"t": "ref", "v": memo.keys[id(value)]}
        if kind in MUTABLE and (place := self.loans.place(value)):
            return {"t": "lent", "v": place}
        if kind in MUTABLE:
            return {"t": MUTABLE[kind], "k": memo.add(value), "v": self.contents(value, memo), "x": extra_of(value)}
        if kind in IMMUTABLE:
            return {"t": IMMUTABLE[kind], "v": [self.encode(one, memo) for one in value]}
        if kind in TO_TEXT:
            text = TO_TEXT[kind]
            return {"t": kind.__name__, "v": self.encode(list(value), Memo()) if text is None else text(value)}
        if kind is slice:
            return {"t": "slice", "v": [self.encode(one, memo) for one in (value.start, value.stop, value.step)]}
        return self._encode_other(value, memo)

    def _encode_other(self, value, memo):
        kind = type(value)
        if (found := self._encode_known(value)) is not None:
            return found
        if kind.__module__ == "numpy" and (found := self._encode_array(value, memo)) is not None:
            return found
        mine = {"t": "mine", "v": self.export(value), "c": self._described(kind)}
        if isinstance(value, PLAIN_BASES):
            if isinstance(value, tuple) and isinstance(fields := getattr(kind, "_fields", None), tuple):
                mine["n"] = [str(one) for one in fields]
            mine["p"] = self.encode(plain_of(value), Memo())
        return mine

    def _encode_known(self, value):
        """A class, a module, an exception or a function that both sides know; None for anything else."""
        if isinstance(value, type):
            if is_builtin(value):
                return {"t": "type", "v": value.__name__}
            if self.is_guarded and (place := place_of(value)):
                return {"t": "place", "v": place}
            return {"t": "class", "c": self._described(value)}
        if isinstance(value, types.ModuleType):
            return {"t": "module", "v": value.__name__}
        if isinstance(value, BaseException):
            return {"t": "error", "v": self._described_error(value)}
        if self.is_guarded and callable(value) and (place := place_of(value)):
            return {"t": "place", "v": place}
        return None

    def _encode_array(self, value, memo):
        """An array or a number of numpy; None for its other objects."""
        is_array = type(value).__name__ == "ndarray"
        if not is_array and not (hasattr(value, "dtype") and getattr(value, "ndim", None) == 0):
            return None
        if value.dtype.hasobject:
            return self.encode(value.tolist(), memo)
        said = {"d": value.dtype.str, "s": list(value.shape), "v": value.tobytes().hex()}
        return {"t": "array" if is_array else "scalar"} | said

    def contents(self, value, memo):
        """What is in a collection, as JSON."""
        if isinstance(value, dict):
            return [[self.encode(one, memo), self.encode(other, memo)] for one, other in value.items()]
        if isinstance(value, bytearray):
            return value.hex()
        if type(value) is list and all(type(one) in EXACT for one in value):
            return value
        return [self.encode(one, memo) for one in value]

    def decode(self, given, memo):
        """The value of its JSON."""
        if not isinstance(given, dict):
            return given
        kind = given["t"]
        if kind in KINDS:
            if "k" not in given:
                return KINDS[kind](self.decode(one, memo) for one in given["v"])
            made = made_empty(kind, given.get("x"))
            memo.add(made, given["k"])
            self.fill(made, given["v"], memo)
            return made
        if kind in VIEWS:
            return FROM_TEXT[kind](self.decode(given["v"], Memo()))
        if kind in FROM_TEXT:
            return FROM_TEXT[kind](given["v"])
        makers = {
            "int": lambda: int(given["v"], 16),
            "ref": lambda: memo.objects[given["v"]],
            "yours": lambda: self.mine[given["v"]],
            "slice": lambda: slice(*(self.decode(one, memo) for one in given["v"])),
            "type": lambda: builtin_type(given["v"]),
            "class": lambda: self._mirror(given["c"]),
            "module": lambda: stdlib_module(given["v"], may_import=not self.is_guarded),
            "error": lambda: self._error(given["v"]),
            "array": lambda: array_of(given),
            "scalar": lambda: array_of(given)[()],
            "mine": lambda: self._remote(given),
            "lent": lambda: self.loans.at(given["v"]),
        }
        memo.is_lossy |= kind in LOSSY
        if not self.is_guarded:
            makers["was"] = lambda: self.loans.was[given["v"][0]][given["v"][1]]
            makers["place"] = lambda: getattr(stdlib_module(given["v"][0], may_import=True), given["v"][1])
        if kind not in makers:
            raise EndedError("it wrote into its connection")
        return makers[kind]()

    def fill(self, made, contents, memo):
        """Puts contents into a collection, instead of its own."""
        if isinstance(made, dict):
            pairs = [(self.decode(one, memo), self.decode(other, memo)) for one, other in contents]
            made.clear()
            dict.update(made, pairs)
        elif isinstance(made, bytearray):
            made[:] = bytes.fromhex(contents)
        else:
            values = [self.decode(one, memo) for one in contents]
            made.clear()
            (made.update if isinstance(made, set) else made.extend)(values)

    def _remote(self, given):
        mirror = self._mirror(given["c"])
        if "p" in given and mirror._key not in self.named:
            plain = self.decode(given["p"], Memo())
            if "n" in given:
                return collections.namedtuple(mirror.__name__, given["n"], rename=True)(*plain)
            return plain
        if type(given["v"]) is not int:
            raise EndedError("it wrote into its connection")
        found = self.theirs.get(given["v"])
        if found is None:
            found = object.__new__(mirror)
            object.__setattr__(found, "_number", given["v"])
            self.theirs[given["v"]] = found
        self.arrives(given["v"])
        return found

    # -------------------------------------------------------------------------------------------------------- classes

    def _described(self, kind):
        key = self.export(kind)
        if key in self.described:
            return {"v": key}
        self.described.add(key)
        of_its_own = [one for one in kind.__mro__ if one is not object]
        return {
            "v": key,
            "name": kind.__name__,
            "bases": [
                one.__name__ if is_builtin(one) else self._described(one) for one in kind.__bases__ if one is not object
            ],
            "specials": [
                name for name in (*SPECIALS, "__await__") if any(vars(one).get(name) is not None for one in of_its_own)
            ],
            "has_plain": issubclass(kind, PLAIN_BASES),
            "module": str(getattr(kind, "__module__", "")),
        }

    def _mirror(self, given):
        key = given["v"]
        if key in self.classes:
            return self.classes[key]
        bases = [self._mirror(one) if isinstance(one, dict) else builtin_type(one) for one in given["bases"]]
        errors = [one for one in bases if issubclass(one, BaseException)]
        name = str(given["name"])
        if errors and (known := known_error(given, may_import=not self.is_guarded)):
            made = known
        elif errors:
            made = type(
                name, tuple(errors), {"_link": self, "_key": key, "__getattr__": attribute_of_error, "_remote": None}
            )
        else:
            space = {"_link": self, "_key": key, "_has_plain": given["has_plain"] is True, "__slots__": ()}
            space |= {one: special(one) for one in given["specials"] if one in SPECIALS}
            mirrors = tuple(one for one in bases if isinstance(one, Mirror)) or (Remote,)
            if "__await__" in given["specials"]:
                space |= {one: value for one, value in vars(Awaited).items() if callable(value)}
            try:
                made = Mirror(name, mirrors, space)
            except TypeError:  # no order of these bases
                made = Mirror(name, (Remote,), space)
            if "__await__" in given["specials"]:
                Coroutine.register(made)
        self.classes[key] = made
        return made

    # ----------------------------------------------------------------------------------------------------- exceptions

    def _described_error(self, error):
        if not self.is_guarded and getattr(error, "_token", None) is not None:
            return {"token": error._token}
        kind = type(error)
        try:
            text, args = str(error), self.encode(list(error.args), Memo())
        except Exception:
            text, args = "", []
        said = {"text": text, "args": args, "of": self.export(error), "line": _program_line(error)}
        if self.is_guarded:
            self.raised_here[said["of"]] = error
            said["token"] = said["of"]
        return said | ({"type": kind.__name__} if is_builtin(kind) else {"class": self._described(kind)})

    def _error(self, given):
        if self.is_guarded and "token" in given:
            return self.raised_here[given["token"]]
        kind = builtin_type(given["type"]) if "type" in given else self._mirror(given["class"])
        if not issubclass(kind, BaseException):
            raise EndedError("it wrote into its connection")
        if self.is_guarded and issubclass(kind, SystemExit):
            kind = ProgramExit
        args = self.decode(given["args"], Memo())
        try:
            error = kind(*args)
        except Exception:  # it wants other arguments
            error = BaseException.__new__(kind, *args)
            error.args = tuple(args)
        with contextlib.suppress(Exception):
            if "class" in given:
                error._remote = given["of"]
                if not args and given["text"]:
                    error.args = (given["text"],)
            error.program_line = given.get("line", 0)
            if not self.is_guarded:
                error._token = given.get("token")
        if self.is_guarded:
            self.raised_there[id(error)] = error  # which keeps its number its own
        return error


def _program_line(error):
    """The last line of the program that an exception passed, or 0."""
    line, trace = getattr(error, "program_line", 0), error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "program.py":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def last_line(error):
    """An exception in a line, with the line of the program, or else of the tests."""
    place, trace = "", error.__traceback__
    in_tests = 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "program.py":
            place = f" (line {trace.tb_lineno})"
        in_tests = trace.tb_lineno if trace.tb_frame.f_code.co_filename == "tests.py" else in_tests
        trace = trace.tb_next
    if line := getattr(error, "program_line", 0):
        place = f" (line {line})"
    if not place and in_tests:
        place = f" (line {in_tests} of the tests)"
    if isinstance(error, SyntaxError) and error.lineno:
        place = f" (line {error.lineno} of the tests)" if error.filename == "tests.py" else place
    return f"{type(error).__name__}: {error}{place}"[:DETAIL_BYTES]
