"""Self-attention of models whose layers have one of two rotary embeddings."""

import copy
from typing import Any

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from gtpo_megatron.actor.model import rotary
from gtpo_megatron.weights.architecture import Architecture


class LocalRotaryAttention(SelfAttention):
    """Megatron's self-attention, which is given the angles of both embeddings and takes its layer's."""

    def __init__(
        self, config: TransformerConfig, *args: Any, arch: Architecture, layer_number: int, **kwargs: Any
    ) -> None:
        self._is_local = rotary.is_local(arch, layer_number - 1)
        if self._is_local:
            config = copy.copy(config)
            rotary.unset_attention_factor(config)
        super().__init__(config, *args, layer_number=layer_number, **kwargs)

    def forward(self, *args: Any, rotary_pos_emb: Tensor, **kwargs: Any) -> Any:
        """``rotary_pos_emb``: ``[S or P, 1, 2, rotary_size]``, as ``rotary.with_local_angles`` makes them."""
        number = int(self._is_local)
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb[:, :, number : number + 1].contiguous(), **kwargs)
