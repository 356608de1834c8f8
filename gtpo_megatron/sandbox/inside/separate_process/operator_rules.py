"""What operators of a program's objects may decide in the process of the tests (see :mod:`.channel`).

An object *answers*, by its own ``==`` and arithmetic with values of the tests, if it is of a class that the tests name
and they made it: by a call of the class, or by an operator or a copy of an object that answers. What a function or a
method of the program returns does not, not even if it was made before: a class whose objects equal everything, and
whose methods return them, would pass all tests. Runs inside the sandbox; needs the standard library only.
"""

from gtpo_megatron.sandbox.inside.separate_process.proxies import RemoteObject, is_remote
from gtpo_megatron.sandbox.inside.special_methods import ARITHMETIC, CONVERSIONS, ORDER


class OperatorRules:
    """Calls, attributes and operators of the other side's objects; part of :class:`.channel.ObjectChannel`."""

    def __init__(self):
        self.named, self.mixed, self.made = set(), set(), set()
        self.newest, self.came = 0, (0, False)

    def arrives(self, number):
        """Notes that an object came; it is one that the tests made only if who asked for it says so."""
        self.came = number, number > self.newest or number in self.made
        self.newest = max(self.newest, number)
        self.made.discard(number)

    def _made(self, found, kind):
        """What has come last; it is made if it is exactly of a class, and nothing but makers has returned it yet."""
        if isinstance(found, RemoteObject) and type(found) is kind and self.came == (found._number, True):
            self.made.add(found._number)
        return found

    def call(self, key, args, kwargs):
        """Calls an object of the other side."""
        return self.ask("call", of=key, args=args, kwargs=kwargs)

    def construct(self, remote_class, args, kwargs):
        """Calls a class of the other side."""
        return self._made(self.call(remote_class._key, args, kwargs), remote_class)

    def copied(self, remote, name):
        """A copy of an object."""
        found = self.ask("copy", of=remote._number, name=name)
        return self._made(found, type(remote)) if self.answers(remote) else found

    def answers(self, remote):
        """Whether an object decides what it is equal to: the tests made it, and nothing else has returned it since."""
        return remote._number in self.made and type(remote)._key in self.named

    def operate(self, remote, name, args, kwargs):
        """An operator of a remote.

        Between a remote and a value of this side the other side decides nothing: a comparison is made here, or fails,
        and what arithmetic gives is an object there, which is no number here: it could be near to everything. Only
        objects of a class that the tests name turn into numbers after it.
        """
        if self.answers(remote):
            found = self.ask("special", of=remote._number, name=name, args=args, kwargs=kwargs)
            return self._made(found, type(remote)) if name in ARITHMETIC | CONVERSIONS else found
        if name == "__call__":
            return self.call(remote._number, args, kwargs)
        has_value = self.is_tests_side and any(not is_remote(one) for one in args)
        if has_value and (name in ORDER or name in ARITHMETIC):
            value = self.value_of(remote)
            if value is not remote:
                return getattr(value, name, lambda *_: NotImplemented)(*args)
            return NotImplemented if name in ORDER else self._calculated(remote, name, args)
        if has_value and name == "__contains__" and type(remote)._key not in self.named:
            return any(one is args[0] or one == args[0] for one in iter(remote))
        if self._is_mixed(remote, *args) and name in ARITHMETIC:
            return self._calculated(remote, name, args)
        if self._is_mixed(remote) and name in CONVERSIONS:
            raise TypeError(f"{name} of what arithmetic of {type(remote).__name__} with a value has given")
        return self.ask("special", of=remote._number, name=name, args=args, kwargs=kwargs)

    def _is_mixed(self, *values):
        """Whether one of them came of arithmetic with a value of this side."""
        return any(isinstance(one, RemoteObject) and one._number in self.mixed for one in values)

    def _calculated(self, remote, name, args):
        """An object of the other side, made of one of its own and of what came from this side."""
        found = self.ask("special", of=remote._number, name=name, args=args)
        if not isinstance(found, RemoteObject):
            return NotImplemented
        if type(remote)._key not in self.named or self._is_mixed(remote, *args):
            self.mixed.add(found._number)
        return found

    def value_of(self, remote):
        """A remote of a class made of ``list`` or the like, as that; any other as itself."""
        return self.ask("value", of=remote._number) if type(remote)._has_value else remote

    def hash_of(self, remote):
        """Hash by the object's own method if the tests name its class; else by identity."""
        if type(remote)._key in self.named:
            return self.ask("hash", of=remote._number)
        return object.__hash__(remote)
