"""Float32 logits of bfloat16 weights on a CPU, without a float32 copy of the whole output layer for every token.

torch has no product of bfloat16 with a float32 result there, so vLLM (0.32) casts all weights at every step: 113 MB of
float32 for a vocabulary of 49,152 and 576 hidden units, which took longer than the product. Here a tile of them is cast
into memory that stays in the cache, and with AMX its product is one of bfloat16 (``kernels.cpu_products``).
"""

import functools
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from gtpo_megatron.kernels.cpu_products import products_of

TILE_ELEMENTS = 1 << 21
"""8 MiB of float32."""


def float32_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """``h W^T`` with float32 sums.

    Args:
        hidden: ``[n, H]`` bfloat16.
        weight: ``[V, H]`` bfloat16.

    Returns:
        ``[n, V]`` float32.
    """
    rows, width = weight.shape
    wide, step = hidden.float(), max(1, min(rows, TILE_ELEMENTS // width))
    tile = torch.empty(step, width, dtype=torch.float32)
    logits = torch.empty(len(hidden), rows, dtype=torch.float32)
    with products_of(weight):
        for part, out in zip(torch.split(weight, step), torch.split(logits, step, dim=1), strict=True):
            cast = tile[: len(part)].copy_(part)
            torch.mm(wide, cast.t(), out=out)
    return logits


@functools.cache
def install() -> None:
    """Has vLLM's output layer in this process do so where a float32 head is asked of bfloat16 weights."""
    otherwise = LogitsProcessor._apply_head

    @functools.wraps(otherwise)
    def apply_head(self: LogitsProcessor, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None) -> Tensor:
        is_plain = isinstance(lm_head.quant_method, (UnquantizedEmbeddingMethod, UnquantizedLinearMethod))
        is_cast = self.head_dtype == torch.float32 and hidden_states.dtype == torch.bfloat16 and embedding_bias is None
        if not (is_plain and is_cast and hidden_states.dim() == 2 and lm_head.weight.dtype == torch.bfloat16):
            logits: Tensor = otherwise(self, lm_head, hidden_states, embedding_bias)
            return logits
        return float32_logits(hidden_states, lm_head.weight)

    LogitsProcessor._apply_head = apply_head
