"""Reductions over the ranks that share a batch: the protocol, and the implementation for one process.

The maths follows local -> reduce -> apply: it computes additive numbers from this rank's responses, asks a reduction
for their totals and applies them. It never sees a process group, and the reduction contains no formula.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Reduction(Protocol):
    """The ranks that the batch is sharded over."""

    def gather_rows(self, read_rows: Callable[[], Tensor], signature: str) -> tuple[Tensor, slice]:
        """Gathers a few integers of every response of the batch.

        Args:
            read_rows: validates this rank's inputs and returns ``[B, C]`` int64; a GTPOError in it is raised on all
                ranks.
            signature: text that must be equal on all ranks, such as the configuration.

        Returns:
            ``[R, C]`` int64 on the CPU, ordered by rank and the same on every rank; and which of its rows are this
            rank's.
        """
        ...

    def gather_values(self, values: Tensor) -> Tensor:
        """Gathers one number per response: ``[B]`` float64 -> ``[R]`` on the CPU, in the order of ``gather_rows``."""
        ...

    def max(self, values: Tensor) -> Tensor:
        """Maximum over ranks, elementwise, float64; may overwrite ``values``."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, elementwise, int64; may overwrite ``values``."""
        ...


class LocalReduction:
    """The reduction of a process that holds all responses."""

    def gather_rows(self, read_rows: Callable[[], Tensor], signature: str) -> tuple[Tensor, slice]:  # noqa: ARG002
        """See ``Reduction``."""
        table = read_rows()
        return table, slice(0, len(table))

    def gather_values(self, values: Tensor) -> Tensor:
        """See ``Reduction``."""
        return values.cpu()

    def max(self, values: Tensor) -> Tensor:
        """See ``Reduction``."""
        return values

    def sum(self, values: Tensor) -> Tensor:
        """See ``Reduction``."""
        return values
