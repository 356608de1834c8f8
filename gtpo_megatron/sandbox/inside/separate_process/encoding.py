"""Values of one process as JSON for another, and back.

Numbers, texts and Python's own collections cross as copies, and only as such: what arrives is an exact ``int``,
``str``, ``list``. Everything else stays where it is, and the other side has a proxy (:mod:`.proxies`). A value that is
no value of JSON is an object with its kind, ``t``. Runs inside the sandbox; needs the standard library only.
"""

import collections
import contextlib
import types
import weakref
from collections.abc import Coroutine

from gtpo_megatron.sandbox.inside.separate_process.proxies import (
    SPECIALS,
    Awaited,
    RemoteClass,
    RemoteObject,
    attribute_of_error,
    is_remote,
    special,
)
from gtpo_megatron.sandbox.inside.separate_process.values import (
    BUILTIN_BASES,
    EXACT,
    FROM_TEXT,
    FROM_VALUES,
    IMMUTABLE,
    INTRUDED,
    KINDS,
    LARGEST,
    MUTABLE,
    TEXTS,
    VIEWS,
    EndedError,
    Memo,
    array_of,
    builtin_type,
    builtin_value,
    extra_of,
    is_builtin,
    known_error,
    made_empty,
    place_of,
    stdlib_module,
)
from gtpo_megatron.sandbox.inside.tracebacks import PROGRAM, ProgramExit, lines_in

LOSSY = ("mine", "error", "array", "scalar")
"""What may be decoded to something that is not the same when it goes back."""


class Encoding:
    """Encodes and decodes, and remembers what has crossed; part of :class:`.channel.ObjectChannel`.

    Args:
        shared: collections that both sides keep alike.
        is_tests_side: whether this side has the tests, and does not trust the other.
    """

    def __init__(self, shared, *, is_tests_side):
        self.shared, self.is_tests_side = shared, is_tests_side
        self.mine, self.keys, self.described = {}, {}, set()
        self.classes, self.theirs = {}, weakref.WeakValueDictionary()
        self.raised_here, self.raised_there = {}, {}
        self.makers = {
            "int": lambda given, _: int(given["v"], 16),
            "ref": lambda given, memo: memo.objects[given["v"]],
            "yours": lambda given, _: self.mine[given["v"]],
            "slice": lambda given, memo: slice(*(self.decode(one, memo) for one in given["v"])),
            "type": lambda given, _: builtin_type(given["v"]),
            "class": lambda given, _: self._remote_class(given["c"]),
            "module": lambda given, _: stdlib_module(given["v"], may_import=not is_tests_side),
            "error": lambda given, _: self._error(given["v"]),
            "array": lambda given, _: array_of(given),
            "scalar": lambda given, _: array_of(given)[()],
            "mine": lambda given, _: self._remote(given),
            "shared": lambda given, _: shared.at(given["v"]),
        }
        if not is_tests_side:
            self.makers["was"] = lambda given, _: shared.was[given["v"][0]][given["v"][1]]
            self.makers["place"] = lambda given, _: getattr(
                stdlib_module(given["v"][0], may_import=True), given["v"][1]
            )

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
            return {"t": "yours", "v": value._key if isinstance(value, RemoteClass) else value._number}
        if id(value) in memo.keys:
            return {"t": "ref", "v": memo.keys[id(value)]}
        if kind in MUTABLE and (place := self.shared.place(value)):
            return {"t": "shared", "v": place}
        if kind in MUTABLE:
            return {"t": MUTABLE[kind], "k": memo.add(value), "v": self.contents(value, memo), "x": extra_of(value)}
        if kind in IMMUTABLE:
            return {"t": IMMUTABLE[kind], "v": [self.encode(one, memo) for one in value]}
        if kind in TEXTS:
            return {"t": kind.__name__, "v": TEXTS[kind][0](value)}
        if kind in VIEWS:
            return {"t": kind.__name__, "v": self.encode(list(value), Memo())}
        return self._encode_other(value, memo)

    def _encode_other(self, value, memo):
        kind = type(value)
        if kind is slice:
            return {"t": "slice", "v": [self.encode(one, memo) for one in (value.start, value.stop, value.step)]}
        if (found := self._encode_known(value)) is not None:
            return found
        if kind.__module__ == "numpy" and (found := self._encode_array(value, memo)) is not None:
            return found
        mine = {"t": "mine", "v": self.export(value), "c": self._described(kind)}
        if isinstance(value, BUILTIN_BASES):
            if isinstance(value, tuple) and isinstance(fields := getattr(kind, "_fields", None), tuple):
                mine["n"] = [str(one) for one in fields]
            mine["p"] = self.encode(builtin_value(value), Memo())
        return mine

    def _encode_known(self, value):
        """A class, a module, an exception or a function that both sides know; None for anything else."""
        if isinstance(value, type):
            if is_builtin(value):
                return {"t": "type", "v": value.__name__}
            if self.is_tests_side and (place := place_of(value)):
                return {"t": "place", "v": place}
            return {"t": "class", "c": self._described(value)}
        if isinstance(value, types.ModuleType):
            return {"t": "module", "v": value.__name__}
        if isinstance(value, BaseException):
            return {"t": "error", "v": self._described_error(value)}
        if self.is_tests_side and callable(value) and (place := place_of(value)):
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
        if kind in FROM_VALUES:
            return FROM_VALUES[kind](self.decode(given["v"], Memo()))
        if kind in FROM_TEXT:
            return FROM_TEXT[kind](given["v"])
        memo.is_lossy |= kind in LOSSY
        if kind not in self.makers:
            raise EndedError(INTRUDED)
        return self.makers[kind](given, memo)

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
        remote_class = self._remote_class(given["c"])
        if "p" in given and remote_class._key not in self.named:
            value = self.decode(given["p"], Memo())
            if "n" in given:
                return collections.namedtuple(remote_class.__name__, given["n"], rename=True)(*value)
            return value
        if type(given["v"]) is not int:
            raise EndedError(INTRUDED)
        found = self.theirs.get(given["v"])
        if found is None:
            found = object.__new__(remote_class)
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
            "has_value": issubclass(kind, BUILTIN_BASES),
            "module": str(getattr(kind, "__module__", "")),
        }

    def _remote_class(self, given):
        key = given["v"]
        if key in self.classes:
            return self.classes[key]
        bases = [self._remote_class(one) if isinstance(one, dict) else builtin_type(one) for one in given["bases"]]
        errors = [one for one in bases if issubclass(one, BaseException)]
        name = str(given["name"])
        if errors and (known := known_error(given, may_import=not self.is_tests_side)):
            made = known
        elif errors:
            made = type(
                name, tuple(errors), {"_channel": self, "_key": key, "__getattr__": attribute_of_error, "_remote": None}
            )
        else:
            space = {"_channel": self, "_key": key, "_has_value": given["has_value"] is True, "__slots__": ()}
            space |= {one: special(one) for one in given["specials"] if one in SPECIALS}
            remote_bases = tuple(one for one in bases if isinstance(one, RemoteClass)) or (RemoteObject,)
            if "__await__" in given["specials"]:
                space |= {one: value for one, value in vars(Awaited).items() if callable(value)}
            try:
                made = RemoteClass(name, remote_bases, space)
            except TypeError:  # no order of these bases
                made = RemoteClass(name, (RemoteObject,), space)
            if "__await__" in given["specials"]:
                Coroutine.register(made)
        self.classes[key] = made
        return made

    # ----------------------------------------------------------------------------------------------------- exceptions

    def _described_error(self, error):
        if not self.is_tests_side and getattr(error, "_token", None) is not None:
            return {"token": error._token}
        kind = type(error)
        try:
            text, args = str(error), self.encode(list(error.args), Memo())
        except Exception:
            text, args = "", []
        line = (lines_in(PROGRAM, error) or [getattr(error, "program_line", 0)])[-1]
        said = {"text": text, "args": args, "of": self.export(error), "line": line}
        if self.is_tests_side:
            self.raised_here[said["of"]] = error
            said["token"] = said["of"]
        return said | ({"type": kind.__name__} if is_builtin(kind) else {"class": self._described(kind)})

    def _error(self, given):
        if self.is_tests_side and "token" in given:
            return self.raised_here[given["token"]]
        kind = builtin_type(given["type"]) if "type" in given else self._remote_class(given["class"])
        if not issubclass(kind, BaseException):
            raise EndedError(INTRUDED)
        if self.is_tests_side and issubclass(kind, SystemExit):
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
            if not self.is_tests_side:
                error._token = given.get("token")
        if self.is_tests_side:
            self.raised_there[id(error)] = error  # which keeps its number its own
        return error
