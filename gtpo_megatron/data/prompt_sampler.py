"""Samples problems epoch by epoch in a seeded order, with a resumable state."""

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from gtpo_megatron.batch import Problem
from gtpo_megatron.data.problem_pool import ProblemPool
from gtpo_megatron.errors import CheckpointError, ConfigError, DataError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.text import shown

_POOL_KEYS = {"order", "pool"}
_STATE_KEYS = {"seed", "epoch", "position", "num_problems", "fingerprint"}


P = TypeVar("P", bound=Problem)


class PromptSampler(Generic[P]):
    """Returns every problem once per epoch, in an order that depends only on ``(seed, epoch)``.

    With a pool, every problem that it has in the epoch, by what was known when the epoch began, and at least as many as
    a step takes.

    Args:
        problems: the data set.
        seed: seed of the orders.
        pool: chooses the problems of an epoch; None: all are in each.
        rates: what the pool knows from before, as of ``note``; of problems of other sets, too.
    """

    def __init__(
        self,
        problems: Sequence[P],
        seed: int,
        pool: ProblemPool | None = None,
        rates: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        if not problems:
            raise DataError("got no problems to sample; expected at least one")
        self._problems = tuple(problems)
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._pool = pool
        self._numbers = {problem.problem_id: number for number, problem in enumerate(self._problems)}
        self.note({name: counts for name, counts in (rates or {}).items() if name in self._numbers})
        self._order = self._shuffled(0)
        self._fingerprint = _fingerprint(self._problems)

    def next(self, num: int) -> tuple[P, ...]:
        """The next ``num`` problems, across the end of an epoch if needed.

        Raises:
            ConfigError: ``num`` is not positive, or larger than the data set.
        """
        if not 1 <= num <= len(self._problems):
            raise ConfigError(
                f"prompts_per_step={num}: must lie between 1 and the number of problems, {len(self._problems)}"
            )
        chosen: list[P] = []
        while len(chosen) < num:
            if self._position == len(self._order):
                self._epoch += 1
                self._position = 0
                self._order = self._shuffled(self._epoch)
            if self._position == 0:
                self._fill(num)
            end = min(self._position + num - len(chosen), len(self._order))
            chosen += [self._problems[index] for index in self._order[self._position : end]]
            self._position = end
        return tuple(chosen)

    def note(self, outcomes: Mapping[str, tuple[int, int]]) -> None:
        """Tells the pool how groups came out: correct responses and those with a verdict, by the problem's id."""
        if self._pool is None:
            return
        for problem_id, (correct, counted) in outcomes.items():
            self._pool.note(self._numbers[problem_id], correct, counted, epoch=self._epoch)

    def metrics(self) -> dict[str, float]:
        """Of the pool; none without one."""
        return {} if self._pool is None else self._pool.metrics(self._epoch)

    def state_dict(self) -> dict[str, Any]:
        """The state, JSON-serialisable."""
        state: dict[str, Any] = {
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "num_problems": len(self._problems),
            "fingerprint": self._fingerprint,
        }
        if self._pool is not None:  # what was known when the epoch began is known no more
            state |= {"order": list(self._order), "pool": self._pool.state_dict()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from ``state``.

        Raises:
            CheckpointError: the state is malformed, or of another data set or seed.
        """
        if set(state) ^ _STATE_KEYS in (_POOL_KEYS, set()) and ("pool" in state) != (self._pool is not None):
            raise CheckpointError(
                f"the checkpoint is of a run with data.pool.enabled={'pool' in state}; resume with the same"
            )
        expected = _STATE_KEYS | (_POOL_KEYS if self._pool is not None else set())
        if set(state) != expected:
            raise CheckpointError(f"sampler state has the keys {sorted(state)}, expected {sorted(expected)}")
        mine = self.state_dict()
        for key in ("seed", "num_problems", "fingerprint"):
            if state[key] != mine[key]:
                raise CheckpointError(
                    f"sampler state of another run: its {key} is {shown(state[key])}, here it is {mine[key]!r}; "
                    "resume with the data set (and data.pool.verdicts) and seed of the checkpoint"
                )
        fields = Fields(dict(state), "sampler state", CheckpointError)
        epoch = fields.get("epoch", int, at_least=0)
        position = fields.get("position", int, at_least=0, at_most=len(self._problems))
        self._epoch, self._position = epoch, position
        if self._pool is None:
            self._order = self._shuffled(epoch)
            return
        self._pool.load_state_dict(fields.get("pool", dict[str, Any]), num_problems=len(self._problems))
        self._order = fields.get("order", list[int])
        is_order = len(set(self._order)) == len(self._order) and set(self._order) <= set(range(len(self._problems)))
        if not is_order or position > len(self._order):
            raise CheckpointError(
                "sampler state has an order that is none of these problems; the checkpoint is damaged"
            )

    def _shuffled(self, epoch: int) -> list[int]:
        """The order of an epoch; the seed is text because its hash is the same in every Python process."""
        order = list(range(len(self._problems)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        if self._pool is None:
            return order
        active = [number for number in order if not self._pool.is_retired(number, epoch)] or order
        return [number for number in active if self._pool.is_drawn(number, epoch)]

    def _fill(self, num: int) -> None:
        """An epoch has a step's problems at least, the others those that are not retired before those that are."""
        if self._pool is None or len(self._order) >= num:
            return
        pool, epoch, rest = self._pool, self._epoch, sorted(set(range(len(self._problems))).difference(self._order))
        random.Random(f"{self._seed}/{epoch}/rest").shuffle(rest)
        rest.sort(key=lambda number: pool.is_retired(number, epoch))
        self._order += rest[: num - len(self._order)]


def _fingerprint(problems: Sequence[Problem]) -> str:
    """Digest of ids, prompts and answers, in order."""
    digest = hashlib.sha256()
    for problem in problems:
        digest.update(f"{problem.problem_id}\0{problem.prompt_ids}\0{problem.answer}\0".encode())
    return digest.hexdigest()[:16]
