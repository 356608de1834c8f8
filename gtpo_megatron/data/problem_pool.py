"""How often each problem was solved lately, and how often it is drawn for that."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gtpo_megatron.config.problems import PoolConfig
from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.untrusted.fields import Fields

MEMORY = 0.5
"""Part of a problem's rate that one more group leaves of what it was."""


@dataclass(slots=True)
class _Record:
    """What is known of a problem that was sampled.

    Attributes:
        rate: how often it was solved, the newest group counting half.
        in_a_row: groups since the last one with a wrong response.
        retired_at: the epoch in which it was retired; -1: it is not.
    """

    rate: float
    in_a_row: int = 0
    retired_at: int = -1


class ProblemPool:
    """Chooses the problems of an epoch by what came of them before.

    A problem that is solved at a rate ``p`` is in an epoch with the chance
    ``max(floor, 1 - |p - target| / max(target, 1 - target))``; one that was never sampled is in it. A problem that was
    solved by all responses of ``retire_after`` groups in a row is retired, and back after ``return_after`` epochs.

    Args:
        config: configuration of the pool.
        seed: seed of the chances.
    """

    def __init__(self, config: PoolConfig, seed: int) -> None:
        self._config, self._seed = config, seed
        self._records: dict[int, _Record] = {}

    def note(self, number: int, correct: int, counted: int, *, epoch: int) -> None:
        """Remembers how a group of a problem came out.

        Args:
            number: of the problem.
            correct: responses that are correct.
            counted: responses with a verdict, at least one.
            epoch: the epoch that is under way.
        """
        rate = correct / counted
        record = self._records.get(number)
        if record is None:
            record = self._records[number] = _Record(rate)
        else:
            record.rate = MEMORY * record.rate + (1 - MEMORY) * rate
        record.in_a_row = record.in_a_row + 1 if correct == counted else 0
        if self._config.retire_after and record.in_a_row >= self._config.retire_after:
            record.in_a_row, record.retired_at = 0, epoch

    def is_in(self, number: int, epoch: int) -> bool:
        """Whether a problem is in an epoch; the same whenever it is asked, as long as nothing is noted."""
        record = self._records.get(number)
        if record is None:
            return True
        if self._is_retired(record, epoch):
            return False
        target = self._config.target
        chance = max(self._config.floor, 1 - abs(record.rate - target) / max(target, 1 - target))
        return random.Random(f"{self._seed}/{epoch}/{number}").random() < chance

    def metrics(self, epoch: int) -> dict[str, float]:
        """Problems that were sampled, those of them that are retired, and the mean of their rates."""
        records = self._records.values()
        return {
            "prompts/pool_seen_count": float(len(records)),
            "prompts/pool_retired_count": float(sum(self._is_retired(one, epoch) for one in records)),
            "prompts/pool_rate_mean": sum(one.rate for one in records) / max(1, len(records)),
        }

    def state_dict(self) -> dict[str, list[Any]]:
        """JSON-serialisable: number -> rate, groups in a row, epoch of retirement."""
        return {str(number): [one.rate, one.in_a_row, one.retired_at] for number, one in self._records.items()}

    def load_state_dict(self, state: Mapping[str, Any], *, num_problems: int) -> None:
        """Continues from ``state``.

        Raises:
            CheckpointError: the state is malformed.
        """
        fields, self._records = Fields(dict(state), "state of the pool", CheckpointError), {}
        for name in state:
            values = fields.get(name, list[float])
            is_known = name.isdecimal() and int(name) < num_problems
            if not is_known or len(values) != len(_Record.__slots__) or not 0 <= values[0] <= 1:
                raise CheckpointError(f"state of the pool has {name!r}: {values!r}; the checkpoint is damaged")
            self._records[int(name)] = _Record(values[0], int(values[1]), int(values[2]))

    def _is_retired(self, record: _Record, epoch: int) -> bool:
        return record.retired_at >= 0 and epoch - record.retired_at <= self._config.return_after
