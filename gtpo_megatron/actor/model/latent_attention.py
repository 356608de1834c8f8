"""Multi-latent attention, of Megatron's layers or Transformer Engine's: one class for both, and for both versions.

Megatron's own gives the rotated key's gradient one tensor rank's share only where it splits the projections to latents,
has a norm inside layers of Transformer Engine where a model has none, and asks for that library by name.
"""

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from gtpo_megatron.actor.model import rotary
from gtpo_megatron.actor.model.layer_classes import LayerClasses
from gtpo_megatron.weights.architecture import Architecture


class LatentSelfAttention(MegatronModule):
    """Attention whose queries, keys and values are made of latents (arXiv 2405.04434, Eq. 37-47).

    Tensor-parallel ranks share the heads. The projections to latents are small, and whole on every rank: under sequence
    parallelism a rank makes the latents of its own tokens, and what is gathered is latents, not hidden states.
    """

    def __init__(
        self, config: Any, submodules: LayerClasses, arch: Architecture, layer_number: int, **options: Any
    ) -> None:
        super().__init__(config=config)
        assert arch.latents is not None  # its family says so
        self.latents, self.plain_size = arch.latents, arch.head_size - arch.latents.rotated_size
        self.attention_factor = rotary.attention_factor(arch)
        self.num_heads = arch.num_heads // config.tensor_model_parallel_size
        self.is_checkpointed = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        rank, hidden_size = self.latents.query_rank, arch.hidden_size
        if rank is None:
            self.linear_q_proj = self._to_heads(submodules, hidden_size, arch.query_width)
        else:
            self.linear_q_down_proj = self._to_latents(hidden_size, rank)
            self.q_layernorm = self._norm(submodules, rank)
            self.linear_q_up_proj = self._to_heads(submodules, rank, arch.query_width)
        rank = self.latents.key_value_rank
        self.linear_kv_down_proj = self._to_latents(hidden_size, self.latents.cached_size)
        self.kv_layernorm = self._norm(submodules, rank)
        keys_and_values = arch.num_heads * (self.plain_size + self.latents.value_size)
        self.linear_kv_up_proj = self._to_heads(submodules, rank, keys_and_values)
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
            softmax_scale=rotary.score_factor(arch) * arch.head_size**-0.5,
            k_channels=arch.head_size,
            v_channels=self.latents.value_size,
            **{name: value for name, value in options.items() if name in ("cp_comm_type", "pg_collection")},
        )
        self.linear_proj = build_module(
            submodules.row_parallel_linear,
            arch.output_width,
            hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="proj",
            tp_group=parallel_state.get_tensor_model_parallel_group(),
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: Any = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Attends within each packed sequence.

        Args:
            hidden_states: ``[p, 1, H]``, under sequence parallelism ``[p / tp, 1, H]``.
            attention_mask: not looked at.
            rotary_pos_emb: angles, ``[longest sequence or p, 1, 1, rotated_size]``.
            packed_seq_params: Megatron's record of where sequences start.

        Returns:
            As ``hidden_states``; no bias.
        """
        cos_sin = rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb
        query, key, value = self._heads(hidden_states.squeeze(1), cos_sin, packed_seq_params.cu_seqlens_q)

        def attend(*heads: Tensor) -> Tensor:
            output: Tensor = self.core_attention(
                *heads, attention_mask, attn_mask_type=AttnMaskType.causal, packed_seq_params=packed_seq_params
            )
            return output

        if self.is_checkpointed and self.training:
            attended = tensor_parallel.checkpoint(attend, False, query, key, value)
        else:
            attended = attend(query, key, value)
        output, _ = self.linear_proj(attended.reshape(len(attended), 1, -1))
        return output, None

    def _heads(self, hidden: Tensor, angles: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query and key ``[p, heads / tp, head_size]``, value ``[p, heads / tp, value_size]``."""
        latents = self.latents
        if latents.query_rank is None:
            query, _ = self.linear_q_proj(hidden)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)))
        shared, turned = self.linear_kv_down_proj(hidden).split([latents.key_value_rank, latents.rotated_size], dim=-1)
        keys_and_values, _ = self.linear_kv_up_proj(self.kv_layernorm(shared))
        if self.config.sequence_parallel:
            turned = gather_from_sequence_parallel_region(turned)
        else:
            turned = copy_to_tensor_model_parallel_region(turned)
        plain, rotated = query.unflatten(-1, (self.num_heads, -1)).split(
            [self.plain_size, latents.rotated_size], dim=-1
        )
        query = torch.cat([plain, self._rotated(rotated, angles, bounds)], dim=-1)
        plain, value = keys_and_values.unflatten(-1, (self.num_heads, -1)).split(
            [self.plain_size, latents.value_size], dim=-1
        )
        turned = self._rotated(turned.unsqueeze(1), angles, bounds).expand(-1, self.num_heads, -1)
        return query, torch.cat([plain, turned], dim=-1), value.contiguous()

    def _rotated(self, heads: Tensor, angles: Tensor, bounds: Tensor) -> Tensor:
        """Rotates pairs of neighbours ``[p, heads, rotated_size]``, and leaves them as halves: scores are the same."""
        halves = torch.cat([heads[..., 0::2], heads[..., 1::2]], dim=-1)
        rotated: Tensor = apply_rotary_pos_emb(
            halves,
            angles,
            config=self.config,
            cu_seqlens=bounds,
            mscale=self.attention_factor,
            cp_group=parallel_state.get_context_parallel_group(),
        )
        return rotated

    def _to_latents(self, inputs: int, outputs: int) -> torch.nn.Linear:
        """Whole on every tensor rank; under sequence parallelism, ranks' gradients are summed as those of norms are."""
        linear = torch.nn.Linear(inputs, outputs, bias=False, dtype=self.config.params_dtype)
        setattr(linear.weight, "sequence_parallel", self.config.sequence_parallel)  # noqa: B010 - not a field that torch knows
        return linear

    def _norm(self, layers: LayerClasses, size: int) -> torch.nn.Module:
        norm: torch.nn.Module = build_module(
            layers.norm, hidden_size=size, config=self.config, eps=self.config.layernorm_epsilon
        )
        return norm

    def _to_heads(self, layers: LayerClasses, inputs: int, outputs: int) -> torch.nn.Module:
        linear: torch.nn.Module = build_module(
            layers.column_parallel_linear,
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="qkv",
            tp_group=parallel_state.get_tensor_model_parallel_group(),
        )
        return linear
