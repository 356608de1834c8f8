"""Attention whose queries and keys pass their RMSNorms behind the rotation, not before it."""

from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from gtpo_megatron.actor import cpu_tiles
from gtpo_megatron.weights.architecture import Architecture


class HeadNorm(torch.nn.Module):
    """``w x / sqrt(mean of squares + eps)`` of every head that a rank has; all heads of all ranks share the weight."""

    def __init__(self, config: TransformerConfig, head_size: int, eps: float) -> None:
        super().__init__()
        self._eps, self._is_summed = eps, config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.empty(head_size, dtype=config.params_dtype))
        setattr(self.weight, "sequence_parallel", self._is_summed)  # noqa: B010 - not a field that torch knows

    def forward(self, heads: Tensor) -> Tensor:
        """Of ``[p, heads / tp, head_size]``.

        Collectives: in backward a sum of the weight's gradient over tp, which Megatron makes under sequence
        parallelism.
        """
        weight = self.weight if self._is_summed else copy_to_tensor_model_parallel_region(self.weight)
        if not heads.is_cuda:
            return cpu_tiles.rms_norm(heads, weight, self._eps)
        return torch.nn.functional.rms_norm(heads, heads.shape[-1:], weight, self._eps)


class NormedCoreAttention(MegatronModule):
    """A core attention, which is given rotated queries and keys, behind their norms."""

    def __init__(self, config: TransformerConfig, *args: Any, arch: Architecture, inner: Any, **kwargs: Any) -> None:
        super().__init__(config=config)
        self.q_layernorm, self.k_layernorm = (HeadNorm(config, arch.head_size, arch.norm_eps) for _ in range(2))
        self.inner = build_module(inner, *args, config=config, **kwargs)

    def forward(self, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As the attention within."""
        attended: Tensor = self.inner(self.q_layernorm(query), self.k_layernorm(key), *args, **kwargs)
        return attended
