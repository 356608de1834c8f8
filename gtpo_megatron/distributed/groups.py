"""The process groups of a rank, by parallel axis."""

from dataclasses import dataclass

from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelGroups:
    """This rank's group along every axis; None is an axis of size one.

    Attributes:
        tp: ranks that split every layer's matrices.
        cp: ranks that hold other tokens of the same sequences.
        dp: ranks that hold other rows of the same batch.
        pp: ranks that hold other layers.
    """

    tp: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    dp: ProcessGroup | None = None
    pp: ProcessGroup | None = None
