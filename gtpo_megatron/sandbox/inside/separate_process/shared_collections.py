"""Collections of a program that its tests have read from an attribute or a name: both sides keep them alike.

Each side remembers them by the numbers of the request, with their contents as both sides know them. Every message
takes along the contents of those that its side has changed since. Runs inside the sandbox; needs the standard library
only.
"""

import itertools
import operator

from gtpo_megatron.sandbox.inside.separate_process.values import INTRUDED, MUTABLE, EndedError, elements, is_same

MAX_SHARED = 100
MAX_ELEMENTS = 10_000
"""Elements of all collections that are remembered: they are looked at with each message."""


class SharedCollections:
    """The collections that one side remembers.

    Args:
        channel: see :class:`.channel.ObjectChannel`; the tests' side says what both forget.
    """

    def __init__(self, channel):
        self.channel = channel
        self.memos, self.before, self.places, self.sizes = {}, {}, {}, {}
        self.dropped = []
        self.num_begun = 0
        self.is_filling = False
        self.was = {}
        self.sources, self.sizes_then, self.then = [], [], []
        self.is_known = True

    def begun(self):
        """A number for the collections of a request."""
        self.num_begun += 1
        return self.num_begun

    def add(self, number, memo):
        """Remembers the collections of an answer."""
        if len(memo.objects) < 2:  # the first is the list of arguments
            return
        self.memos[number] = memo
        self._watch(number)
        if self.channel.is_tests_side:
            self.sizes[number] = sum(map(len, memo.objects.values()))
            if self.sizes[number] > MAX_ELEMENTS:
                self._drop(number)
            while len(self.memos) > MAX_SHARED or sum(self.sizes.values()) > MAX_ELEMENTS:
                self._drop(next(iter(self.memos)))

    def place(self, value):
        """By which numbers the other side knows a collection; None if it does not."""
        return self.places.get(id(value))

    def at(self, place):
        """A collection by its numbers."""
        number, key = place
        return self.memos[number].objects[key]

    def put_into(self, message):
        """Adds what this side has changed to a message."""
        if self.is_filling or self._is_unchanged():
            return
        found = []
        for number, memo in self.memos.items():
            before = self.before[number]
            keys = [key for key, then in before.items() if not is_same(then, memo.objects[key])]
            if keys:
                found.append([number, [[key, self._contents(memo, key, before[key])] for key in keys]])
                self._watch(number)
        if found:
            message["shared"] = found
        if self.dropped:
            message["dropped"], self.dropped = self.dropped, []

    def take_from(self, message):
        """Changes what the other side has changed."""
        if not self.channel.is_tests_side:
            for number in message.get("dropped", ()):
                if number in self.memos:
                    self._drop(number)
        if "shared" not in message or self.is_filling:
            return
        self.is_filling = True
        try:
            for number, changed in message["shared"]:
                memo, self.was = self.memos[number], self.before[number]
                for key, contents in changed:
                    self.channel.fill(memo.objects[key], contents, memo)
                self._watch(number)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise EndedError(INTRUDED) from error
        finally:
            self.is_filling = False

    def _is_unchanged(self):
        """Whether nothing is to be said, which is found at once for all collections."""
        if not self.is_known:
            self.sources = []
            for number, memo in self.memos.items():
                for key in self.before[number]:
                    value = memo.objects[key]
                    self.sources += [value, value.values()] if isinstance(value, dict) else [value]
            self.then = [one for before in self.before.values() for then in before.values() for one in then]
            self.sizes_then = [size for sizes in self._sizes() for size in sizes]
            self.is_known = True
        is_sized = list(map(len, self.sources)) == self.sizes_then
        is_same = is_sized and all(map(operator.is_, itertools.chain.from_iterable(self.sources), self.then))
        return is_same and not self.dropped

    def _sizes(self):
        for number, memo in self.memos.items():
            for key, then in self.before[number].items():
                is_dict = isinstance(memo.objects[key], dict)
                yield [len(then) // 2] * 2 if is_dict else [len(then)]

    def _watch(self, number):
        self.is_known = False
        objects = {key: value for key, value in self.memos[number].objects.items() if key}  # 0: that list of arguments
        self.before[number] = {key: elements(value) for key, value in objects.items()}
        self.places.update((id(value), (number, key)) for key, value in objects.items())

    def _drop(self, number):
        self.is_known = False
        for value in self.memos.pop(number).objects.values():
            self.places.pop(id(value), None)
        del self.before[number]
        if self.channel.is_tests_side:
            del self.sizes[number]
            self.dropped.append(number)

    def _contents(self, memo, key, before):
        """A collection's contents; elements that did not cross as they are by where they were."""
        value = memo.objects[key]
        if not memo.is_lossy or isinstance(value, set | bytearray):
            return self.channel.contents(value, memo)
        where = {id(one): at for at, one in enumerate(before)}

        def said(one):
            if id(one) in where and type(one) not in MUTABLE:
                return {"t": "was", "v": [key, where[id(one)]]}
            return self.channel.encode(one, memo)

        if isinstance(value, dict):
            return [[said(one), said(other)] for one, other in value.items()]
        return [said(one) for one in value]
