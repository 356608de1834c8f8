"""Deals out problems, epoch after epoch, each in its own order; stops and goes on exactly."""

import hashlib
import random
from collections.abc import Mapping, Sequence

from gtpo_megatron.batch import Problem
from gtpo_megatron.errors import CheckpointError, ConfigError, DataError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.text import shown

_STATE_KEYS = {"seed", "epoch", "position", "num_problems", "fingerprint"}


class PromptSampler:
    """Every problem once an epoch, in an order drawn from ``(seed, epoch)`` alone.

    So the state is a handful of integers, and the order does not depend on how many problems are asked for at a time.

    Args:
        problems: the data set.
        seed: of the orders.
    """

    def __init__(self, problems: Sequence[Problem], seed: int) -> None:
        if not problems:
            raise DataError("got no problems to sample; expected at least one")
        self._problems = tuple(problems)
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._shuffled(0)
        self._fingerprint = _fingerprint(self._problems)

    def next(self, num: int) -> tuple[Problem, ...]:
        """The next ``num`` problems; goes over into the next epoch where this one ends.

        Raises:
            ConfigError: ``num`` is not positive, or exceeds an epoch: one step would hold problems twice.
        """
        if not 1 <= num <= len(self._problems):
            raise ConfigError(
                f"prompts_per_step={num}: must lie between 1 and the number of problems, {len(self._problems)}"
            )
        dealt: list[Problem] = []
        while len(dealt) < num:
            if self._position == len(self._problems):
                self._epoch += 1
                self._position = 0
                self._order = self._shuffled(self._epoch)
            end = min(self._position + num - len(dealt), len(self._problems))
            dealt += [self._problems[index] for index in self._order[self._position : end]]
            self._position = end
        return tuple(dealt)

    @property
    def epoch(self) -> int:
        """The epoch of the last problem dealt, from 0."""
        return self._epoch

    def state_dict(self) -> dict[str, int | str]:
        """Where the sampler stands; JSON-serialisable, a few dozen bytes."""
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "num_problems": len(self._problems),
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Goes on where ``state`` was taken.

        Raises:
            CheckpointError: the state is malformed, or of another data set or seed.
        """
        if set(state) != _STATE_KEYS:
            raise CheckpointError(f"sampler state has the keys {sorted(state)}, expected {sorted(_STATE_KEYS)}")
        mine = self.state_dict()
        for key in ("seed", "num_problems", "fingerprint"):
            if state[key] != mine[key]:
                raise CheckpointError(
                    f"sampler state of another run: its {key} is {shown(state[key])}, here it is {mine[key]!r}; "
                    "resume with the data set and seed of the checkpoint"
                )
        fields = Fields(dict(state), "sampler state", CheckpointError)
        epoch = fields.get("epoch", int, at_least=0)
        position = fields.get("position", int, at_least=0, at_most=len(self._problems))
        self._epoch, self._position = epoch, position
        self._order = self._shuffled(epoch)

    def _shuffled(self, epoch: int) -> list[int]:
        """The order of an epoch; seeded by text, whose hash is the same in every process and Python version."""
        order = list(range(len(self._problems)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def _fingerprint(problems: Sequence[Problem]) -> str:
    """Tells data sets apart: a digest over ids, prompts and answers, in order."""
    digest = hashlib.sha256()
    for problem in problems:
        digest.update(f"{problem.problem_id}\0{problem.prompt_ids}\0{problem.answer}\0".encode())
    return digest.hexdigest()[:16]
