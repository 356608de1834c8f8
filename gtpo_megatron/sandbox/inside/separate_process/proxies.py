"""Objects of the other process of the sandbox, with their operators, and what it may ask of ours (see :mod:`.channel`).

Runs inside the sandbox; needs the standard library only.
"""

import abc
import copy
import sys
import types
from typing import Any

from gtpo_megatron.sandbox.inside.separate_process.values import builtin_value
from gtpo_megatron.sandbox.inside.special_methods import ARITHMETIC, CONVERSIONS, ORDER, dunders

OTHER = dunders(
    "call len length_hint iter next getitem setitem delitem contains reversed missing bytes enter exit format "
    "aiter anext aenter aexit"
)
SPECIALS = ARITHMETIC | ORDER | CONVERSIONS | OTHER
"""OperatorRules that a remote has if its class has them; ``==``, ``hash`` and ``await`` are its own."""
STEPPED = types.GeneratorType | types.CoroutineType | types.AsyncGeneratorType
STEPS = tuple(side + name for side in ("", "a") for name in ("send", "throw", "close"))
"""What there is to do with a generator; its frame would tell what the tests' names are."""
CODE = (
    types.FunctionType | types.BuiltinFunctionType | types.MethodType | types.ModuleType
    | types.FrameType | types.CodeType | types.TracebackType | STEPPED
)  # fmt: skip
OF_MOCKS = (
    "attach_mock", "configure_mock", "mock_add_spec", "reset_mock", "method_calls", "return_value", "side_effect",
)  # fmt: skip
"""Attributes of mocks by which a program could make checks of its calls pass."""
READABLE = ("__name__", "__qualname__", "__doc__", "__dict__", "__annotations__", "__wrapped__", "__defaults__")


class RemoteClass(abc.ABCMeta):
    """The class of classes of remotes: calls and attributes are requests."""

    def __call__(cls, *args, **kwargs):
        return cls._channel.construct(cls, args, kwargs)

    def __getattr__(cls, name):
        if name.startswith("__") and name.endswith("__") and name not in READABLE:
            raise AttributeError(name)
        return cls._channel.ask("get", of=cls._key, name=name)

    def __setattr__(cls, name, value):
        if name.startswith("_"):  # Python's own bookkeeping
            super().__setattr__(name, value)
        else:
            cls._channel.ask("set", of=cls._key, name=name, args=(value,))

    def __iter__(cls):
        return iter(cls._channel.ask("special", of=cls._key, name="__iter__", args=()))

    def __len__(cls):
        return cls._channel.ask("special", of=cls._key, name="__len__", args=())

    def __bool__(cls):
        return True

    def __getitem__(cls, item):
        return cls._channel.ask("special", of=cls._key, name="__getitem__", args=(item,))


class RemoteObject:
    """An object of the other process."""

    __slots__ = ("__weakref__", "_number")
    _channel = None

    def __getattr__(self, name):
        if name.startswith("__") and name not in READABLE:
            raise AttributeError(name)
        return self._channel.ask("get", of=self._number, name=name)

    def __setattr__(self, name, value):
        self._channel.ask("set", of=self._number, name=name, args=(value,))

    def __delattr__(self, name):
        self._channel.ask("delete", of=self._number, name=name)

    def __repr__(self):
        return self._channel.ask("text", of=self._number, name="repr")

    def __str__(self):
        return self._channel.ask("text", of=self._number, name="str")

    def __dir__(self):
        return self._channel.ask("text", of=self._number, name="dir")

    def __eq__(self, other):
        if self is other:
            return True
        if is_remote(other) or self._channel.answers(self):
            return self._channel.ask("equal", of=self._number, args=(other,)) is True
        value = self._channel.value_of(self)
        return NotImplemented if value is self else value == other

    def __hash__(self):
        return self._channel.hash_of(self)

    def __copy__(self):
        return self._channel.copied(self, "copy")

    def __deepcopy__(self, _):
        return self._channel.copied(self, "deepcopy")


def is_remote(value):
    """Whether a value is an object or a class of the other process."""
    return isinstance(type(value), RemoteClass) or isinstance(value, RemoteClass)


def special(name):
    """A method that asks the other process for an operator."""
    if name == "__exit__":

        def leave(self, kind, error, _trace):
            swallowed = self._channel.ask("special", of=self._number, name=name, args=(kind, error, None))
            # what the tests raise, such as a failed assertion, a program can not swallow
            return bool(swallowed) and self._channel.is_theirs(error)

        return leave

    def operate(self, *args, **kwargs):
        return self._channel.operate(self, name, args, kwargs)

    return operate


class Awaited:
    """Methods of what can be awaited: the other process runs it to its end."""

    def __await__(self):
        return self._channel.ask("await", of=self._number)
        yield

    def send(self, _):
        """Runs it; its result ends the coroutine."""
        raise StopIteration(self._channel.ask("await", of=self._number))

    def throw(self, *error):
        """Nothing can be thrown into it."""
        raise error[0]

    def close(self):
        """Does nothing."""


def attribute_of_error(error, name):
    """An attribute of an exception of the program."""
    if name.startswith("_") or error._remote is None:
        raise AttributeError(name)
    return error._channel.ask("get", of=error._remote, name=name)


TEXTS: dict[str, Any] = {"str": str, "repr": repr, "dir": dir}

OPERATIONS: dict[str, Any] = {
    "call": lambda it, _, args, kwargs: it(*args, **kwargs),
    "get": lambda it, name, *_: getattr(it, name),
    "set": lambda it, name, args, _: setattr(it, name, *args),
    "delete": lambda it, name, *_: delattr(it, name),
    "special": lambda it, name, args, kwargs: getattr(type(it), name)(it, *args, **kwargs),
    "equal": lambda it, _, args, __: bool(it == args[0]),
    "hash": lambda it, *_: hash(it),
    "text": lambda it, name, *_: TEXTS[name](it),
    "value": lambda it, *_: builtin_value(it),
    "copy": lambda it, name, *_: {"copy": copy.copy, "deepcopy": copy.deepcopy}[name](it),
    "await": lambda it, *_: awaited(it),
}
"""What the other side may ask of an object."""


def check_allowed(op, name, it, args=()):
    """Raises AttributeError for what an untrusted side may not do with an object of this one."""
    is_mock = any(one.__module__ == "unittest.mock" for one in type(it).__mro__)
    is_code = isinstance(it, CODE)
    # of classes it makes objects only if the tests wrote them: one of io opens this process's descriptors
    may_call = callable(it) and (not isinstance(it, type) or it.__module__ == "__main__")
    fine = {
        "call": may_call,
        "get": not name.startswith("_")
        and (not is_code or (isinstance(it, STEPPED) and name in STEPS))
        and not (is_mock and name in OF_MOCKS),
        "set": not is_code and not isinstance(it, type) and _may_set(name, it, args, is_mock),
        "special": name in SPECIALS and not isinstance(it, types.ModuleType) and (name != "__call__" or may_call),
        "value": True,
        "equal": True,
        "hash": True,
        "text": True,
        "copy": not isinstance(it, types.ModuleType),
        "await": True,
    }
    if not fine.get(op):
        raise AttributeError(f"{op} {name}")


def _may_set(name, it, args, is_mock):
    """Whether an untrusted side may set an attribute: none that checks or counts calls, and no method."""
    if name.startswith(("_", "assert", "called", "call_")) or callable(getattr(type(it), name, None)):
        return False
    return not is_mock or not (name.startswith("mock_") or name in OF_MOCKS or any(callable(one) for one in args))


def awaited(it):
    """The result of what can be awaited."""
    import asyncio  # here, because it is slow, and rare

    async def wait():
        return await it

    loops = sys.modules["asyncio"].__dict__.setdefault("_loop_of_channel", [])
    if not loops:
        loops.append(asyncio.new_event_loop())
    return loops[0].run_until_complete(wait())
