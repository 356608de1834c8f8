"""Samples problems epoch by epoch in a seeded order, with a resumable state."""

import hashlib
import random
from collections.abc import Mapping, Sequence

from gtpo_megatron.batch import Problem
from gtpo_megatron.errors import CheckpointError, ConfigError, DataError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.text import shown

_STATE_KEYS = {"seed", "epoch", "position", "num_problems", "fingerprint"}


class PromptSampler:
    """Returns every problem once per epoch, in an order that depends only on ``(seed, epoch)``.

    Args:
        problems: the data set.
        seed: seed of the orders.
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
        """The next ``num`` problems, across the end of an epoch if needed.

        Raises:
            ConfigError: ``num`` is not positive, or larger than an epoch.
        """
        if not 1 <= num <= len(self._problems):
            raise ConfigError(
                f"prompts_per_step={num}: must lie between 1 and the number of problems, {len(self._problems)}"
            )
        chosen: list[Problem] = []
        while len(chosen) < num:
            if self._position == len(self._problems):
                self._epoch += 1
                self._position = 0
                self._order = self._shuffled(self._epoch)
            end = min(self._position + num - len(chosen), len(self._problems))
            chosen += [self._problems[index] for index in self._order[self._position : end]]
            self._position = end
        return tuple(chosen)

    def state_dict(self) -> dict[str, int | str]:
        """The state, JSON-serialisable."""
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "num_problems": len(self._problems),
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Continues from ``state``.

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
        """The order of an epoch; the seed is text because its hash is the same in every Python process."""
        order = list(range(len(self._problems)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def _fingerprint(problems: Sequence[Problem]) -> str:
    """Digest of ids, prompts and answers, in order."""
    digest = hashlib.sha256()
    for problem in problems:
        digest.update(f"{problem.problem_id}\0{problem.prompt_ids}\0{problem.answer}\0".encode())
    return digest.hexdigest()[:16]
