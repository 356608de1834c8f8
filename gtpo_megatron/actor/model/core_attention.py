"""Attention for packed sequences through torch's scaled-dot-product kernels, where Transformer Engine is absent."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from gtpo_megatron.actor.cpu_products import products_by_mkl
from gtpo_megatron.data.packing import held_positions
from gtpo_megatron.errors import ConfigError


class PackedSDPA(MegatronModule):
    """Causal attention within each packed sequence; the scores of other sequences are never formed.

    Megatron's local attention refuses packed sequences and materialises all scores. This takes the same
    ``PackedSeqParams`` as Transformer Engine's, which takes its place on a GPU. Under context parallelism every rank
    gathers all keys and values, which is simple and exact but needs their memory; Transformer Engine passes them on in
    a ring instead, or exchanges them for heads.

    Attributes:
        softmax_offset: ``[heads / tp]``, of every head the logarithm of what is added to its softmax's sum (a sink);
            None for models without. Megatron's and Transformer Engine's name.
    """

    def __init__(
        self, config: Any, layer_number: int = 1, *_: Any, softmax_scale: float | None = None, **__: Any
    ) -> None:
        super().__init__(config=config)
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window: int = config.window_size[0] + 1 if has_window else 0
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.grouped = config.num_attention_heads != config.num_query_groups
        self.context_size: int = config.context_parallel_size
        self.context_index: int = parallel_state.get_context_parallel_rank() if self.context_size > 1 else 0
        sinks = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            sinks = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
        self.register_parameter("softmax_offset", sinks)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any = None, **__: Any
    ) -> Tensor:
        """Attends.

        Args:
            query: ``[p, heads / tp, head_size]``.
            key: ``[p, query groups / tp, head_size]``.
            value: as ``key``, but of any head size.
            packed_seq_params: ``cu_seqlens_q`` says where whole sequences start; its last entry is ``P = p * cp``.

        Returns:
            ``[p, heads / tp * value's head size]``.

        Collectives: under context parallelism one all-gather over cp, and in backward one reduce-scatter.
        """
        bounds: list[int] = packed_seq_params.cu_seqlens_q.tolist()
        if self.context_size == 1:
            # neighbours of one length go together; one split, not a slice a sequence, since the backward of every
            # slice would fill a tensor of all tokens
            lengths = [end - start for start, end in itertools.pairwise(bounds)]
            runs = [(length, len(list(run))) for length, run in itertools.groupby(lengths)]
            parts = (torch.split(whole, [length * count for length, count in runs]) for whole in (query, key, value))
            outputs = [
                self._attend(*(part.unflatten(0, (count, length)) for part in sequences))
                for (length, count), *sequences in zip(runs, *parts, strict=True)
            ]
            return torch.cat([output.flatten(0, 1) for output in outputs]).flatten(1)
        return torch.cat(self._attend_shared(query, key, value, bounds)).flatten(1)

    def _attend_shared(self, query: Tensor, key: Tensor, value: Tensor, bounds: Sequence[int]) -> list[Tensor]:
        """This rank's two chunks of every sequence, over the keys of all ranks."""
        whole = self._gather(torch.cat([key, value], dim=-1), bounds)
        key, value = torch.split(whole, [key.shape[-1], value.shape[-1]], dim=-1)
        chunks_held = (self.context_index, 2 * self.context_size - 1 - self.context_index)
        outputs = []
        for start, end in itertools.pairwise(bounds):
            chunk = (end - start) // (2 * self.context_size)
            held = query[start // self.context_size : end // self.context_size]
            for part, index in zip((held[:chunk], held[chunk:]), chunks_held, strict=True):
                seen = start + (index + 1) * chunk
                outputs.append(self._attend(part[None], key[None, start:seen], value[None, start:seen])[0])
        return outputs

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The queries of the last positions to all keys up to their own, or the window's, in every sequence of a batch.

        Args:
            query: ``[b, q, heads / tp, head_size]``.
            key: ``[b, k, query groups / tp, head_size]``, ``k >= q``.
            value: as ``key``, but of any head size: it is filled up with zeros, since the kernels know one size only.

        Returns:
            As ``query``, with the value's head size.
        """
        num_queries, num_keys, value_size = query.shape[1], key.shape[1], value.shape[-1]
        if value_size < key.shape[-1]:
            value = F.pad(value, (0, key.shape[-1] - value_size))
        window, before, mask = self.window or num_keys, num_keys - num_queries, None
        if before or window < num_keys:
            mask = query.new_ones(num_queries, num_keys, dtype=torch.bool).tril(before).triu(before - window + 1)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if query.is_cuda:
            if self.softmax_offset is not None:
                raise ConfigError("attention sinks need Transformer Engine on a GPU; install it")
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=self.grouped
            )
        else:
            attended = CPUAttention.apply(q, k, v, mask, self.scale, self.softmax_offset)  # type: ignore[no-untyped-call]
        return attended.transpose(1, 2)[..., :value_size]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Sinks, of which tensor-parallel ranks have those of their heads."""
        if self.softmax_offset is None:
            return {}
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )

    def _gather(self, held: Tensor, bounds: Sequence[int]) -> Tensor:
        """``[p, ...]`` of this rank's tokens to ``[P, ...]`` in packed order; backward sums what all ranks ask for."""
        gathered = gather_from_sequence_parallel_region(
            held, tensor_parallel_output_grad=True, group=parallel_state.get_context_parallel_group()
        )
        order = torch.cat([held_positions(bounds, self.context_size, rank) for rank in range(self.context_size)])
        whole: Tensor = gathered.index_select(0, order.argsort())
        return whole


class CPUAttention(torch.autograd.Function):
    """torch's kernel for CPUs, in float32 and with MKL's products, whatever the dtype and the library of the model's.

    Its products are small: in bfloat16, or by oneDNN, they take up to six times as long (docs/performance.md). What is
    kept for backward has the model's dtype, as the kernel itself would keep it.

    The kernel knows no sinks. With ``l`` the logarithm of a query's softmax's sum, ``l' = log(exp(l) + exp(sink))`` is
    that with the sink, and the output is ``exp(l - l')`` of the kernel's. Its backward pass asks for output and ``l``
    only, so that ``l'`` gives it the probabilities with the sink. The sink's own is ``p = exp(sink - l')``, it has no
    value, and so its gradient is the sum over queries of ``-p (output . gradient)``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """``[b, heads, q, head_size]``, twice ``[b, groups, k, head_size]``, ``[q, k]`` bool -> as ``query``."""
        ctx.scale = scale
        ctx.bias = None if mask is None else torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
        with products_by_mkl():
            output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query.float(), key.float(), value.float(), 0.0, mask is None, attn_mask=ctx.bias, scale=scale
            )
        if sinks is not None:
            with_sinks = torch.logaddexp(logsumexp, sinks.float()[:, None])
            output = output * (logsumexp - with_sinks).exp()[..., None]
            logsumexp = with_sinks
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, logsumexp, sinks)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query, key, value and sinks."""
        *kept, logsumexp, sinks = ctx.saved_tensors
        of_sinks = None
        if sinks is not None:
            products = (gradient.float() * kept[-1].float()).sum(-1)
            of_sinks = -((sinks.float()[:, None] - logsumexp).exp() * products).sum((0, 2)).to(sinks.dtype)
        with products_by_mkl():
            gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(tensor.float() for tensor in (gradient, *kept)),
                logsumexp,
                0.0,
                ctx.bias is None,
                attn_mask=ctx.bias,
                scale=ctx.scale,
            )
        return (*(found.to(gradient.dtype) for found in gradients), None, None, of_sinks)
