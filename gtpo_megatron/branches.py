"""Responses that branch: several sequences of tokens in one row.

An episode may go on from any point of what was said: a sub-agent begins anew, a history is compacted, a turn is sampled
twice. Its tokens stand in one row in the order in which they were sampled, each once; a :class:`Branch` says where one
does not follow the token before it. So rewards, groups, means and records have one row an episode, whatever its shape,
and only who runs a transformer over it asks for its :func:`paths`.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from gtpo_megatron.errors import ShapeError

NOTHING = -1
"""``Branch.after`` of one that reads nothing of the row: it has a prompt of its own."""


class Branch(NamedTuple):
    """A point of a response from which on tokens follow others than those before them.

    Attributes:
        start: place in the response of the first of them.
        after: they follow the tokens that end at this place of the response: 0 the prompt, ``NOTHING`` none at all.
    """

    start: int
    after: int


class Path(NamedTuple):
    """A sequence of tokens as the sampler had it.

    Attributes:
        has_prompt: whether it begins with the row's prompt.
        stretches: first and last-plus-one place of each stretch of the response in it, in their order.
        num_known: tokens of the stretches that an earlier path of the row has too; they come first.
    """

    has_prompt: bool
    stretches: tuple[tuple[int, int], ...]
    num_known: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the response in it."""
        return sum(end - start for start, end in self.stretches)

    @property
    def new_stretches(self) -> tuple[tuple[int, int], ...]:
        """The stretches without what an earlier path has."""
        found, known = [], self.num_known
        for start, end in self.stretches:
            first = min(start + known, end)
            known -= first - start
            if first < end:
                found.append((first, end))
        return tuple(found)


def check_within(branches: Sequence[Branch], length: int) -> None:
    """Raises ShapeError unless the branches begin within a response of ``length`` tokens, and follow earlier ones."""
    last = 0
    for start, after in branches:
        if not (last < start < length and NOTHING <= after <= start):
            raise ShapeError(
                f"branches {[tuple(one) for one in branches]} of a response of {length} tokens: expected pairs (start, "
                f"after) with ascending starts within it, and after from {NOTHING} to start"
            )
        last = start


def paths(length: int, branches: Sequence[Branch] = ()) -> tuple[Path, ...]:
    """The sequences of a response, which together have all of its tokens; each token is new in one of them.

    One ends wherever nothing goes on, and has all that its last token was sampled after.

    Args:
        length: tokens of the response.
        branches: its branches.
    """
    starts = [0, *(branch.start for branch in branches)]
    ends = [*starts[1:], length]
    afters = [0, *(branch.after for branch in branches)]
    found: list[Path] = []
    num_seen = [0] * len(starts)  # tokens of each part, from its start, that an earlier path has
    for end in ends:
        if end in afters[1:]:
            continue
        stretches: list[tuple[int, int]] = []
        known, place = 0, end
        while place > 0:
            part = bisect_right(starts, place - 1) - 1
            stretches.append((starts[part], place))
            known += min(num_seen[part], place - starts[part])
            num_seen[part] = max(num_seen[part], place - starts[part])
            place = afters[part]
        found.append(Path(has_prompt=place == 0, stretches=tuple(stretches[::-1]), num_known=known))
    return tuple(found)
