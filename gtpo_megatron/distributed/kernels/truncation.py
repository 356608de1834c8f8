"""Top-k and top-p: the truncated distribution that such a sampler drew from, under tensor parallelism.

The kept set of a token is ``{v : z_v > threshold}`` plus the target. The threshold lies half-way between the
smallest kept and the largest dropped logit, so recomputing the logits in backward keeps the same set. Logits tied at
the boundary are kept together. The target is always kept: the sampler drew it, and where trainer and sampler differ
by rounding its log-probability must stay finite.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from gtpo_megatron.distributed.kernels.gather import gather_stacked
from gtpo_megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncation:
    """A sampler's truncation, applied as vLLM does: temperature, then top-k, then top-p of what top-k left.

    Attributes:
        top_k: keep the k largest logits; 0 keeps all.
        top_p: keep the smallest set of largest logits with at least this mass; 1 keeps all.
    """

    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.top_k < 0:
            raise ConfigError(f"top_k: got {self.top_k}, expected 0 (no limit) or a positive count")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p: got {self.top_p}, expected a number in (0, 1]")

    @property
    def is_identity(self) -> bool:
        """Nothing is cut."""
        return self.top_k == 0 and self.top_p == 1.0


def thresholds(
    logits: Tensor,
    truncation: Truncation,
    inverse_temperature: float | Tensor,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None,
) -> Tensor:
    """Logit above which a column is kept.

    Args:
        logits: ``[n, V/tp]`` float32 or float64, this rank's columns, padding included.
        truncation: what to keep.
        inverse_temperature: ``1 / T``, one or ``[n]``.
        vocab_size: true size of the vocabulary.
        tp_group: ranks that share the vocabulary.

    Returns:
        ``[n]``, of the dtype of ``logits``; ``-inf`` where all is kept; equal on all ranks.

    Collectives: one all-gather of the logits over ``tp_group``.
    """
    everything = logits if tp_group is None else gather_stacked(logits, tp_group).transpose(0, 1).flatten(1)
    limit = min(truncation.top_k or vocab_size, vocab_size)
    if truncation.top_p == 1.0:
        # One more than is kept: the threshold lies between the two.
        ordered = everything[:, :vocab_size].topk(min(limit + 1, vocab_size), dim=1).values
        kept = torch.full_like(ordered[:, 0], limit, dtype=torch.int64)
    else:
        ordered = everything[:, :vocab_size].sort(dim=1, descending=True).values
        scaled = ordered.double() * (
            inverse_temperature[:, None] if isinstance(inverse_temperature, Tensor) else inverse_temperature
        )
        probability = torch.softmax(scaled[:, :limit], dim=1)
        mass_before = probability.cumsum(1) - probability
        kept = (mass_before < truncation.top_p).sum(1).clamp(min=1)
    last_kept = ordered.gather(1, kept[:, None] - 1)
    first_dropped = ordered.gather(1, kept[:, None].clamp(max=ordered.shape[1] - 1))
    middle = (last_kept + first_dropped) / 2
    threshold = torch.where(middle < last_kept, middle, torch.nextafter(last_kept, last_kept - 1))
    return torch.where(kept[:, None] < ordered.shape[1], threshold, -torch.inf).squeeze(1)


def drop_below_(logits: Tensor, threshold: Tensor, target_columns: Tensor) -> None:
    """Sets what the truncation removes to ``-inf``, the target excepted.

    Args:
        logits: ``[n, c]``, changed in place.
        threshold: ``[n]``.
        target_columns: ``[n]``, the target's column in this tile, or outside ``[0, c)``.
    """
    dropped = logits <= threshold[:, None]
    held = ((target_columns >= 0) & (target_columns < logits.shape[1])).nonzero().squeeze(1)
    dropped[held, target_columns[held]] = False
    logits.masked_fill_(dropped, -torch.inf)
