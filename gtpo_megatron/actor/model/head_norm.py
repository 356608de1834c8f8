"""The RMSNorm of queries or keys over all heads at once, though tensor-parallel ranks have some of them each."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class AllHeadsNorm(torch.nn.Module):
    """``w x / sqrt(mean of squares + eps)`` of a token, the mean over the elements of all ranks' heads.

    Every rank has the whole weight and reads its heads' part, since Megatron sums the gradients of whatever is called
    ``q_layernorm`` or ``k_layernorm`` over the tensor-parallel ranks.

    Attributes:
        weight: ``[num_heads, head_size]``, as one row.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, num_heads: int, **_: Any
    ) -> None:
        super().__init__()
        self._shape, self._eps = (num_heads, hidden_size), eps
        self._held = num_heads // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.empty(num_heads * hidden_size, dtype=config.params_dtype))

    def forward(self, heads: Tensor) -> Tensor:
        """Of ``[p, 1, heads / tp, head_size]``; the sum is made and applied in float32.

        Collectives: one all-reduce of a number per token over tp, and in backward another.
        """
        values = heads.float()
        squares = values.square().sum((-2, -1), keepdim=True)
        # every rank's output depends on the sum: its gradient is summed, too
        squares = reduce_from_tensor_model_parallel_region(copy_to_tensor_model_parallel_region(squares))
        normed = values * torch.rsqrt(squares / self.weight.numel() + self._eps)
        first = parallel_state.get_tensor_model_parallel_rank() * self._held
        weight = self.weight.view(self._shape)[first : first + self._held]
        return (normed * weight.float()).to(heads.dtype)
