"""Reductions over the ranks that share a batch: the protocol, and the implementation for one process.

The maths follows local -> reduce -> apply: it computes additive numbers from this rank's responses, asks a reduction
for their totals and applies them. It never sees a process group, and the reduction contains no formula.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredRows:
    """A table of every response of the batch, the same on every rank.

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
    """A range of a flat buffer whose values are held by the same ranks.

    Attributes:
        members: ranks in ascending order; this rank is one of them.
        size: number of values.
    """

    members: tuple[int, ...]
    size: int


class KeyReduction(Protocol):
    """Totals over ranks of one number per key."""

    def max(self, values: Tensor) -> Tensor:
        """Maximum over ranks, float64 ``[K]``; may overwrite ``values``."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, int64 ``[K]``; may overwrite ``values``."""
        ...


class Reduction(KeyReduction, Protocol):
    """The ranks that the batch is sharded over; ``max`` and ``sum`` are over all of them."""

    def gather_rows(self, read_rows: Callable[[], Tensor], signature: str) -> GatheredRows:
        """Calls ``read_rows`` and gathers its ``[B, C]`` int64 rows; an error in it is raised on all ranks.

        Args:
            read_rows: validates this rank's inputs; may raise a GTPOError.
            signature: text that must be equal on all ranks, such as the configuration.
        """
        ...

    def gather_values(self, values: Tensor) -> Tensor:
        """Gathers one number per response: ``[B]`` float64 -> ``[R]`` on the CPU, in the order of ``gather_rows``."""
        ...

    def exchange(self, values: Tensor, ranges: Sequence[SharedRange], operation: Literal["max", "sum"]) -> Tensor:
        """Totals over the members of each range; ``ranges`` tile ``values`` in order."""
        ...


class LocalReduction:
    """The reduction of a process that holds all responses."""

    def gather_rows(self, read_rows: Callable[[], Tensor], signature: str) -> GatheredRows:  # noqa: ARG002 - one rank
        """See ``Reduction``."""
        table = read_rows()
        return GatheredRows(table=table, owners=torch.zeros(len(table), dtype=torch.int64), rank=0)

    def gather_values(self, values: Tensor) -> Tensor:
        """See ``Reduction``."""
        return values.cpu()

    def exchange(
        self,
        values: Tensor,
        ranges: Sequence[SharedRange],  # noqa: ARG002 - nothing is shared
        operation: Literal["max", "sum"],  # noqa: ARG002 - nothing is shared
    ) -> Tensor:
        """See ``Reduction``."""
        return values

    def max(self, values: Tensor) -> Tensor:
        """See ``KeyReduction``."""
        return values

    def sum(self, values: Tensor) -> Tensor:
        """See ``KeyReduction``."""
        return values


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitKeys:
    """Totals over ranks that communicate only the keys which several ranks hold.

    Attributes:
        index: ``[W]`` int64, the communicated keys, in the order of ``ranges``.
        ranges: the ranks that hold them.
        reduction: communicates them.
    """

    index: Tensor
    ranges: Sequence[SharedRange]
    reduction: Reduction

    def max(self, values: Tensor) -> Tensor:
        """See ``KeyReduction``."""
        return values.index_copy_(0, self.index, self.reduction.exchange(values[self.index], self.ranges, "max"))

    def sum(self, values: Tensor) -> Tensor:
        """See ``KeyReduction``."""
        return values.index_copy_(0, self.index, self.reduction.exchange(values[self.index], self.ranges, "sum"))
