"""The time budget of a batch of rows, divided so that rows that hang leave time for the others."""

import threading
import time
from collections.abc import Callable

FREE_SHARE = 0.5
"""Fraction of the budget that is given to the first rows; the rest is divided equally."""


class BatchBudget:
    """The deadlines of a batch and of its rows.

    In the first half of the budget a row may take its whole limit, up to the end of that half. After it, a row may take
    at most an equal fraction of the time left, so that a few rows that hang do not use up the time of the others.

    Args:
        budget_s: seconds for all rows.
        num_rows: rows of the batch.
        num_workers: workers that grade at the same time.
        clock: monotonic seconds.
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
        """Deadline of the batch."""
        return self._begin + self._budget_s

    def row_deadline(self) -> float:
        """Deadline of a row that begins now; call it once per row."""
        with self._lock:
            num_left = max(1, self._num_left)
            self._num_left -= 1
        now = self._clock()
        share = now + max(0.0, self.deadline - now) * min(1.0, self._num_workers / num_left)
        return max(share, self._begin + FREE_SHARE * self._budget_s)
