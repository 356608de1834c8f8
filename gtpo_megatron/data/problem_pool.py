"""How often each problem was solved lately, and how often it is drawn for that."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gtpo_megatron.config.problems import PoolConfig
from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.untrusted.fields import as_kind
from gtpo_megatron.untrusted.text import shown

MEMORY = 0.5
"""Part of a problem's rate that one more group leaves of what it was."""


@dataclass(slots=True)
class _Record:
    """What is known of a problem, by samples or by an evaluation.

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

    def is_retired(self, number: int, epoch: int) -> bool:
        """Whether a problem is left out of an epoch since it is solved."""
        record = self._records.get(number)
        return record is not None and self._is_retired(record, epoch)

    def is_drawn(self, number: int, epoch: int) -> bool:
        """Whether a problem that is not retired is in an epoch; the same as long as nothing is noted."""
        record = self._records.get(number)
        if record is None:
            return True
        target = self._config.target
        chance = max(self._config.floor, 1 - abs(record.rate - target) / max(target, 1 - target))
        return random.Random(f"{self._seed}/{epoch}/{number}").random() < chance

    def metrics(self, epoch: int) -> dict[str, float]:
        """Problems of which a rate is known, those of them that are retired, and the mean of their rates."""
        records = list(self._records.values())  # another thread may be noting
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
        records: dict[int, _Record] = {}
        for number in range(num_problems):
            if (values := state.get(str(number))) is not None:
                records[number] = _record(values, f"state of the pool: {number}")
        if unknown := sorted(state.keys() - map(str, records))[:1]:
            raise CheckpointError(f"state of the pool has {shown(unknown[0])}, which is no problem of this run")
        self._records = records

    def _is_retired(self, record: _Record, epoch: int) -> bool:
        return record.retired_at >= 0 and epoch - record.retired_at <= self._config.return_after


def _record(values: Any, place: str) -> _Record:
    rate, *counts = as_kind(values, list[float], place, CheckpointError)
    is_whole = len(counts) == 2 and all(count == int(count) for count in counts)
    if not (is_whole and 0 <= rate <= 1 and counts[0] >= 0 and counts[1] >= -1):
        raise CheckpointError(f"{place} is {shown(values)}; the checkpoint is damaged")
    return _Record(rate, int(counts[0]), int(counts[1]))
