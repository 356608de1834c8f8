"""The options of one call of the vocabulary-parallel scores."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoreTask:
    """The options of one call, for all of its tiles, forward and backward.

    Attributes:
        target_ids: ``[P]`` int64, ids in the whole vocabulary.
        inverse_temperature: ``1 / T``: a float, or ``[P]`` float64.
        vocab_size: true size of the vocabulary; further columns are padding.
        entropy_grad: whether the entropy is differentiable.
        tp_group: ranks that share the vocabulary; None: one rank.
    """

    target_ids: Tensor
    inverse_temperature: float | Tensor
    vocab_size: int
    entropy_grad: bool
    tp_group: dist.ProcessGroup | None

    @property
    def num_tokens(self) -> int:
        """``P``."""
        return int(self.target_ids.shape[0])

    @property
    def tp_size(self) -> int:
        """Number of ranks that share the vocabulary."""
        return 1 if self.tp_group is None else dist.get_world_size(self.tp_group)

    def first_row(self, local_rows: int) -> int:
        """Id of this rank's first vocabulary row."""
        return 0 if self.tp_group is None else local_rows * dist.get_rank(self.tp_group)

    def true_rows(self, local_rows: int) -> int:
        """Number of this rank's rows that are not padding."""
        return min(local_rows, max(0, self.vocab_size - self.first_row(local_rows)))

    def tile_temperature(self, rows: slice, like: Tensor) -> Tensor | None:
        """``1 / T`` of the tokens ``rows`` for the kernels; None if it is 1."""
        if isinstance(self.inverse_temperature, Tensor):
            return self.inverse_temperature[rows].to(like.dtype)
        if self.inverse_temperature == 1.0:
            return None
        return like.new_full((rows.stop - rows.start,), self.inverse_temperature)

    def merge_temperature(self, rows: slice) -> float | Tensor:
        """``1 / T`` of the tokens ``rows`` for `partials.merge` and `partials.finish`."""
        if isinstance(self.inverse_temperature, Tensor):
            return self.inverse_temperature[rows]
        return self.inverse_temperature
