"""What the maths asks of the outside when responses are dealt to ranks, and its answer on one process.

The maths follows local -> reduce -> apply: it computes additive integers from the rows at hand, asks a ``Reduction``
for their totals and applies them. It never sees a process group; the reduction knows no formula.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredRows:
    """A few numbers of every response of the batch, on every rank alike.

    Attributes:
        table: ``[R, C]`` int64 on the CPU, rows ordered by rank.
        owners: ``[R]`` int64, the rank that holds each row.
        rank: this process's rank.
    """

    table: Tensor
    owners: Tensor
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedRange:
    """A stretch of a flat buffer whose values the same ranks hold.

    Attributes:
        members: ranks, ascending; this one among them.
        size: number of values.
    """

    members: tuple[int, ...]
    size: int


class Reduction(Protocol):
    """Totals over the ranks that the batch was dealt to."""

    def gather_rows(self, read_rows: Callable[[], Tensor], signature: str) -> GatheredRows:
        """Calls ``read_rows`` and gathers its ``[B, C]`` int64 rows; an error in it is raised on all ranks alike.

        Args:
            read_rows: validates this rank's inputs; may raise a GTPOError.
            signature: what all ranks must agree on, such as the configuration.
        """
        ...

    def exchange(self, partial: Tensor, ranges: Sequence[SharedRange], *, keeps_largest: bool = False) -> Tensor:
        """Sums (or maxima) of int64 ``[W]`` over the members of each range; ``ranges`` tile ``partial`` in order."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all ranks of a CPU tensor of int64 or float64."""
        ...

    def max(self, values: Tensor) -> Tensor:
        """Maximum over all ranks of a CPU tensor of float64."""
        ...


class LocalReduction:
    """All responses are here."""

    def gather_rows(self, read_rows: Callable[[], Tensor], signature: str) -> GatheredRows:  # noqa: ARG002 - one rank
        """See ``Reduction``."""
        table = read_rows()
        return GatheredRows(table=table, owners=torch.zeros(len(table), dtype=torch.int64), rank=0)

    def exchange(
        self,
        partial: Tensor,
        ranges: Sequence[SharedRange],  # noqa: ARG002 - nothing is shared
        *,
        keeps_largest: bool = False,  # noqa: ARG002 - nothing is shared
    ) -> Tensor:
        """See ``Reduction``."""
        return partial

    def sum(self, values: Tensor) -> Tensor:
        """See ``Reduction``."""
        return values

    def max(self, values: Tensor) -> Tensor:
        """See ``Reduction``."""
        return values
