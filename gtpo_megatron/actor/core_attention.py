"""Attention for packed sequences through torch's scaled-dot-product kernels, where Transformer Engine is absent."""

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


class PackedSDPA(MegatronModule):
    """Causal attention within each packed sequence; the scores of other sequences are never formed.

    Megatron's local attention refuses packed sequences and materialises all scores. This takes the same
    ``PackedSeqParams`` as Transformer Engine's, which takes its place on a GPU.
    """

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.grouped = config.num_attention_heads != config.num_query_groups

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any = None, **__: Any
    ) -> Tensor:
        """Attends.

        Args:
            query: ``[P, heads / tp, head_size]``.
            key: ``[P, query groups / tp, head_size]``.
            value: as ``key``.
            packed_seq_params: ``cu_seqlens_q`` says where sequences start; its last entry is ``P``.

        Returns:
            ``[P, heads / tp * head_size]``.

        Communication: none.
        """
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        outputs = []
        for start, end in itertools.pairwise(bounds):
            q, k, v = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
            attended = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=self.grouped
            )
            outputs.append(attended[0].transpose(0, 1))
        return torch.cat(outputs).flatten(1)
