"""Gated delta nets over packed sequences, of Megatron's layers or Transformer Engine's: plain torch on any device.

Megatron's own refuses packed sequences without the kernels of flash-linear-attention, and asks for that library.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor

from gtpo_megatron.actor.model.core_attention import PREFIXES
from gtpo_megatron.actor.model.head_exchange import HeadExchange
from gtpo_megatron.actor.model.layer_classes import LayerClasses
from gtpo_megatron.weights.architecture import Architecture

CHUNK = 64
"""Tokens that are computed together, by products, between two states."""

NORM_EPS = 1e-6
"""Added to a query's or key's squared length, whatever the model's epsilon is."""


class GatedDeltaNet(MegatronModule):
    """A gated delta net (arXiv 2412.06464) with a convolution before and a gated norm behind, in attention's place.

    Tensor-parallel ranks share the key heads, each with its value heads. ``a`` and ``b`` are two numbers a value head:
    their projection is whole on every rank, and under sequence parallelism made of the rank's own tokens, so that what
    is gathered for it is these numbers, not hidden states. A state is that of a sequence from its beginning, so
    context-parallel ranks exchange tokens for heads before it, and back behind it.
    """

    def __init__(self, config: Any, submodules: LayerClasses, arch: Architecture, **_: Any) -> None:
        super().__init__(config=config)
        assert arch.delta is not None  # its family says so
        delta, ranks, dtype = arch.delta, config.tensor_model_parallel_size, config.params_dtype
        self.delta, self.num_heads = delta, delta.num_key_heads // ranks
        self.values_per_head = delta.num_value_heads // delta.num_key_heads
        self.is_checkpointed = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        shared = {"config": config, "bias": False, "is_expert": False}
        shared["tp_group"] = parallel_state.get_tensor_model_parallel_group()
        self.in_proj = build_module(
            submodules.column_parallel_linear,
            arch.hidden_size,
            2 * (delta.key_width + delta.value_width),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **shared,
        )
        self.gates_proj = torch.nn.Linear(arch.hidden_size, 2 * delta.num_value_heads, bias=False, dtype=dtype)
        for name, channels in (("query", delta.key_width), ("key", delta.key_width), ("value", delta.value_width)):
            self.register_parameter(f"conv_{name}", _of_heads(channels // ranks, delta.conv_size, dtype=dtype))
        self.A_log = _of_heads(delta.num_value_heads // ranks, dtype=dtype)
        self.dt_bias = _of_heads(delta.num_value_heads // ranks, dtype=dtype)
        self.norm = torch.nn.RMSNorm(delta.value_size, eps=arch.norm_eps, dtype=dtype)
        for whole in (self.gates_proj.weight, self.norm.weight):  # a rank's gradient is that of its tokens, or heads
            setattr(whole, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - not a field that torch knows
        self.out_proj = build_module(
            submodules.row_parallel_linear,
            delta.value_width,
            arch.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **shared,
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, packed_seq_params: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        """Mixes the tokens of each packed sequence.

        Args:
            hidden_states: ``[p, 1, H]``, under sequence parallelism ``[p / tp, 1, H]``.
            attention_mask: not looked at.
            packed_seq_params: Megatron's record of where whole sequences start.

        Returns:
            As ``hidden_states``; no bias.

        Collectives: those of the projections, and one more over tp, of two numbers a token and value head; without
        sequence parallelism in backward a last one, of the norm's weight. Over cp three exchanges of ``HeadExchange``.
        """
        del attention_mask
        assert not any(getattr(packed_seq_params, PREFIXES))  # forward_backward.min_prefix_tokens says so
        bounds: list[int] = packed_seq_params.cu_seqlens_q.tolist()
        projected, _ = self.in_proj(hidden_states)
        query, key, value, gate = self._heads(projected.squeeze(1))
        log_decay, strength = self._gates(hidden_states.squeeze(1))
        exchange = HeadExchange(bounds, self.num_heads)
        query, key, value = exchange.whole(query, key, value)
        log_decay, strength = exchange.whole(log_decay, strength)
        query, key, value = (
            F.silu(convolved(one.flatten(1), exchange.share(weight), bounds)).view_as(one)
            for one, weight in ((query, self.conv_query), (key, self.conv_key), (value, self.conv_value))
        )

        mix = functools.partial(delta_rule, bounds=bounds)
        inputs = (query, key, value, log_decay, strength)
        if self.is_checkpointed and self.training:
            mixed = tensor_parallel.checkpoint(mix, False, *inputs)
        else:
            mixed = mix(*inputs)
        mixed = exchange.held(mixed)
        # a rank's gradient is that of its heads; under sequence parallelism Megatron sums what is marked so
        shared = self.config.sequence_parallel
        weight = self.norm.weight if shared else copy_to_tensor_model_parallel_region(self.norm.weight)
        normed = weight * F.rms_norm(mixed, mixed.shape[-1:], eps=self.norm.eps).to(gate.dtype)
        output, _ = self.out_proj((normed * F.silu(gate.float())).to(gate.dtype).flatten(1).unsqueeze(1))
        return output, None

    def _heads(self, projected: Tensor) -> tuple[Tensor, ...]:
        """Query and key ``[p, key heads / tp, key_size]``, value and gate ``[p, value heads / tp, value_size]``."""
        delta, values = self.delta, self.values_per_head * self.delta.value_size
        by_head = projected.view(len(projected), self.num_heads, -1)
        parts = torch.split(by_head, [delta.key_size, delta.key_size, values, values], dim=-1)
        return *parts[:2], *(part.reshape(len(part), -1, delta.value_size) for part in parts[2:])

    def _gates(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """``log a`` and ``b`` of this rank's value heads, ``[p, value heads / tp]`` float32."""
        gates = self.gates_proj(hidden)
        if self.config.sequence_parallel:
            gates = gather_from_sequence_parallel_region(gates)
        else:
            gates = copy_to_tensor_model_parallel_region(gates)
        gates = gates.unflatten(-1, (self.delta.num_key_heads, 2, self.values_per_head))
        first = parallel_state.get_tensor_model_parallel_rank() * self.num_heads
        strength, step = (one.flatten(1) for one in gates[:, first : first + self.num_heads].float().unbind(2))
        return -self.A_log.float().exp() * F.softplus(step + self.dt_bias.float()), strength.sigmoid()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """For checkpoints: the parameters that are split by heads, and those of the layers in it."""
        group = parallel_state.get_tensor_model_parallel_group()
        own = {name: parameter for name, parameter in self.named_parameters() if "." not in name}
        found = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(own, 0),
            sharded_offsets,
            tp_group=group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )
        for name, module in self.named_children():
            found |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=group)
        return found


def _of_heads(*shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
    """A parameter that tensor-parallel ranks share by heads."""
    parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype))
    set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    return parameter


def convolved(inputs: Tensor, weight: Tensor, bounds: Sequence[int]) -> Tensor:
    """``y_t = sum_i w_(k - 1 - i) x_(t - i)``, ``i < k``, of every channel, over the tokens of its own sequence.

    Args:
        inputs: ``[p, channels]``.
        weight: ``[channels, k]``.
        bounds: where sequences start, and ``p``.
    """
    before = weight.shape[1] - 1
    # a sequence has so many zeros before it
    shift = torch.repeat_interleave(
        torch.arange(1, len(bounds)) * before, torch.tensor([end - start for start, end in itertools.pairwise(bounds)])
    )
    places = (torch.arange(len(inputs)) + shift).to(inputs.device)
    apart = inputs.new_zeros(len(inputs) + before * (len(bounds) - 1), inputs.shape[1])
    apart = apart.index_copy(0, places, inputs)
    outputs = F.conv1d(apart.t()[None], weight.unsqueeze(1), groups=len(weight))[0].t()
    return outputs.index_select(0, places - before)


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, bounds: Sequence[int]
) -> Tensor:
    """``S_t = a_t S_(t-1) + b_t k_t (v_t - (a_t S_(t-1))^T k_t)^T`` and ``o_t = S_t^T q_t``, in chunks.

    Keys have length 1, queries ``1 / sqrt(key_size)``. With ``c_t`` the sum of ``log a`` from a chunk's start to ``t``
    and ``D_ts = exp(c_t - c_s)``, ``s <= t``, a chunk's corrections ``u`` solve ``(1 + A) u = b (v - exp(c) S^T k)``,
    ``A_ts = b_t D_ts k_t . k_s`` for ``s < t``; then ``o_t = exp(c_t) S^T q_t + sum_s D_ts (q_t . k_s) u_s`` and
    ``S' = exp(c_last) S + sum_s exp(c_last - c_s) k_s u_s^T`` (arXiv 2412.06464, Eq. 14-18). A chunk's products are
    computed for all chunks at once, the states one chunk after another, for all sequences at once.

    Args:
        query: ``[p, key heads, key_size]``.
        key: the same.
        value: ``[p, value heads, value_size]``; neighbouring heads share a key head.
        log_decay: ``log a <= 0``, ``[p, value heads]`` float32.
        strength: ``b``, the same.
        bounds: where sequences start, and ``p``.

    Returns:
        ``[p, value heads, value_size]`` float32.
    """
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    counts = [-(-length // CHUNK) for length in lengths]
    padding = [count * CHUNK - length for count, length in zip(counts, lengths, strict=True)]
    shift = torch.tensor([0, *itertools.accumulate(padding[:-1])]).repeat_interleave(torch.tensor(lengths))
    places = (torch.arange(len(query)) + shift).to(query.device)
    heads = key.shape[1]

    def chunks(inputs: Tensor) -> Tensor:
        """``[p, heads, ...]`` to ``[n, key heads, value heads of each, CHUNK, ...]`` float32; padding is 0."""
        whole = inputs.new_zeros(sum(counts) * CHUNK, *inputs.shape[1:], dtype=torch.float32)
        whole = whole.index_copy(0, places, inputs.float())
        whole = whole.view(-1, CHUNK, heads, inputs.shape[1] // heads, *inputs.shape[2:])
        return whole.permute(0, 2, 3, 1, *range(4, whole.ndim))

    q, k = (chunks(_unit(one)) for one in (query, key))
    v, c, b = chunks(value), chunks(log_decay).cumsum(-1), chunks(strength)[..., None]
    q, grown = q * key.shape[-1] ** -0.5, c.exp()[..., None]
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).triu(1)
    decay = (c[..., :, None] - c[..., None, :]).masked_fill(later, -torch.inf).exp()
    system = b * decay * (k @ k.mT)  # its diagonal is taken as 1
    solved = torch.linalg.solve_triangular(
        system, torch.cat([b * v, (b * grown * k).expand(*v.shape[:-1], -1)], -1), upper=False, unitriangular=True
    )
    plain, from_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    within, q = decay * (q @ k.mT), grown * q
    k, last = (c[..., -1:] - c).exp()[..., None] * k, grown[..., -1:, :]

    order = sorted(range(len(counts)), key=lambda number: -counts[number])  # the longest first: they go on
    first = [0, *itertools.accumulate(counts)]
    steps = [[first[number] + step for number in order if counts[number] > step] for step in range(max(counts))]
    numbers = [number for now in steps for number in now]
    # gathered once and split: the backward of every index would fill a tensor of all chunks
    at = torch.tensor(numbers, device=query.device)
    sizes = [len(now) for now in steps]
    parts = (one.index_select(0, at).split(sizes) for one in (plain, from_state, q, within, k, last))
    state = v.new_zeros(len(counts), *v.shape[1:3], k.shape[-1], v.shape[-1])
    outputs = []
    for plain_now, from_state_now, q_now, within_now, k_now, last_now in zip(*parts, strict=True):
        state = state[: len(q_now)]
        update = plain_now - from_state_now @ state
        outputs.append(q_now @ state + within_now @ update)
        state = last_now * state + k_now.mT @ update
    back = at.argsort()
    found = torch.cat(outputs)[back].permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2)
    return found.index_select(0, places)


def _unit(vectors: Tensor) -> Tensor:
    """Of length 1, float32."""
    wide = vectors.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + NORM_EPS)
