"""The classes that layers of ours are built of: Megatron's own, or Transformer Engine's where it is there."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

from gtpo_megatron.actor import cpu_platform, cpu_tiles
from gtpo_megatron.actor.model.core_attention import PackedSDPA


@dataclass(frozen=True, slots=True)
class LayerClasses:
    """What an attention of ours, or what stands in its place, is built of."""

    norm: Any
    column_parallel_linear: Any
    row_parallel_linear: Any
    core_attention: Any


class LocalRMSNorm(torch.nn.RMSNorm):
    """An RMSNorm for sequence parallelism, which Megatron's local norm refuses.

    Its weight has the attribute by which ``finalize_model_grads`` knows whose gradients to sum over the tensor-parallel
    ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self._eps = eps
        self._from_one: bool = config.layernorm_zero_centered_gamma
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - not a field that torch knows

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the last dimension; a factor of ``1 + w`` is made and applied in float32, as transformers does."""
        weight = 1 + self.weight.float() if self._from_one else self.weight
        if not hidden.is_cuda:
            return cpu_tiles.rms_norm(hidden, weight, self._eps)
        if not self._from_one:
            return super().forward(hidden)
        return torch.nn.functional.rms_norm(hidden.float(), self.normalized_shape, weight, self._eps).to(hidden.dtype)


def layer_classes() -> LayerClasses:
    """Transformer Engine's if it is there; else Megatron's local ones, our norm and torch's attention."""
    if not cpu_platform.has_transformer_engine():
        return LayerClasses(LocalRMSNorm, ColumnParallelLinear, RowParallelLinear, PackedSDPA)
    from megatron.core.extensions import transformer_engine as te

    return LayerClasses(te.TENorm, te.TEColumnParallelLinear, te.TERowParallelLinear, te.TEDotProductAttention)
