"""The time that a batch of rows may take together, dealt so that rows that hang leave the others theirs."""

import threading
import time
from collections.abc import Callable

FREE_SHARE = 0.5
"""Of the budget: dealt to whoever comes first; the rest is dealt in equal shares."""


class BatchBudget:
    """A deadline for a batch, and what a row may take of the time left.

    In the first half of the budget every row has its whole limit, if that does not reach into the second. There it has
    no more than an equal share of what is left among the rows that are left, so a few rows that hang cannot take the
    verdicts of all that wait behind them.

    Args:
        budget_s: for all rows.
        num_rows: of the batch.
        num_workers: that grade at the same time.
        clock: monotonic.
    """

    def __init__(
        self, budget_s: float, *, num_rows: int, num_workers: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._begin = clock()
        self._budget_s = budget_s
        self._num_left = num_rows
        self._num_workers = num_workers
        self._lock = threading.Lock()

    @property
    def deadline(self) -> float:
        """Of the batch."""
        return self._begin + self._budget_s

    def row_deadline(self) -> float:
        """When a row that begins now has had its share; each row asks once."""
        with self._lock:
            num_left = max(1, self._num_left)
            self._num_left -= 1
        now = self._clock()
        share = now + max(0.0, self.deadline - now) * min(1.0, self._num_workers / num_left)
        return max(share, self._begin + FREE_SHARE * self._budget_s)
