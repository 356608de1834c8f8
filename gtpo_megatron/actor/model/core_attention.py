"""Attention for packed sequences through torch's scaled-dot-product kernels, where Transformer Engine is absent."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from gtpo_megatron.data.packing import Stretches, held_positions, num_places
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.kernels.cpu_products import products_by_mkl

PREFIXES = "gtpo_prefixes"
"""Attribute of ``packed_seq_params``: ``PackedMicroBatch.prefixes``."""


class Block(NamedTuple):
    """Queries and keys that are multiplied with one another.

    Attributes:
        queries: first and last-plus-one packed place.
        keys: their packed stretches, one behind the other.
        num_sequences: that the block has; neighbours of one length, each with its share of queries and keys.
        sees_all: every query sees every key. Else the last one of a sequence does, the one before all but the last, and
            so on: queries are the last tokens of what the keys are of.
    """

    queries: tuple[int, int]
    keys: Stretches
    num_sequences: int = 1
    sees_all: bool = False

    def queries_of(self, packed: Tensor) -> Tensor:
        """``[p, ...]`` -> ``[num_sequences, queries of one, ...]``, a view."""
        return torch.unflatten(packed[slice(*self.queries)], 0, (self.num_sequences, -1))

    def keys_of(self, packed: Tensor) -> Tensor:
        """``[P, ...]`` -> ``[num_sequences, keys of one, ...]``."""
        parts = [packed[start:end] for start, end in self.keys]
        return torch.unflatten(parts[0] if len(parts) == 1 else torch.cat(parts), 0, (self.num_sequences, -1))

    def add_keys(self, packed: Tensor, values: Tensor) -> None:
        """Adds ``[num_sequences, keys of one, ...]`` to ``[P, ...]`` at the keys' places."""
        parts = torch.split(values.flatten(0, 1), [end - start for start, end in self.keys])
        for (start, end), part in zip(self.keys, parts, strict=True):
            packed[start:end] += part

    def mask(self, window: int, device: torch.device) -> Tensor | None:
        """``[queries, keys]`` of a sequence, which a query sees; None: all, or as the kernels' own causal mask says."""
        num_queries = (self.queries[1] - self.queries[0]) // self.num_sequences
        num_keys = num_places(self.keys) // self.num_sequences
        before = num_keys - num_queries
        if self.sees_all or (not before and not 0 < window < num_keys):
            return None
        everything = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
        return everything.tril(before).triu(before - (window or num_keys) + 1)


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
            packed_seq_params: ``cu_seqlens_q`` says where sequences start behind their prefixes; its last entry is
                ``P = p * cp``.

        Returns:
            ``[p, heads / tp * value's head size]``.

        Collectives: under context parallelism one all-gather over cp, and in backward one reduce-scatter.
        """
        bounds: list[int] = packed_seq_params.cu_seqlens_q.tolist()
        value_size = value.shape[-1]
        if value_size < key.shape[-1]:  # the kernels know one size only
            value = F.pad(value, (0, key.shape[-1] - value_size))
        if self.context_size == 1:
            prefixes: Sequence[Stretches] = getattr(packed_seq_params, PREFIXES)
            blocks = _blocks(bounds, prefixes, self.window)
        else:
            blocks = self._held_blocks(bounds)
            whole = self._gather(torch.cat([key, value], dim=-1), bounds)
            key, value = torch.split(whole, [key.shape[-1], value.shape[-1]], dim=-1)
        if query.is_cuda:
            attended = self._by_torch(query, key, value, blocks)
        else:
            attended = CPUAttention.apply(  # type: ignore[no-untyped-call]
                query, key, value, self.softmax_offset, blocks, self.window, self.scale
            )
        return attended[..., :value_size].flatten(1)

    def _held_blocks(self, bounds: Sequence[int]) -> list[Block]:
        """This rank's two chunks of every sequence, over the keys of all ranks."""
        blocks = []
        for start, end in itertools.pairwise(bounds):
            chunk, first = (end - start) // (2 * self.context_size), start // self.context_size
            for index in (self.context_index, 2 * self.context_size - 1 - self.context_index):
                blocks.append(Block((first, first + chunk), ((start, start + (index + 1) * chunk),)))
                first += chunk
        return blocks

    def _by_torch(self, query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block]) -> Tensor:
        """``[p, heads / tp, head_size]``, where nothing is shared; torch's kernels, which know no sinks."""
        if self.softmax_offset is not None:
            raise ConfigError("attention sinks need Transformer Engine on a GPU; install it")
        lengths = [block.queries[1] - block.queries[0] for block in blocks]
        wholes: list[Sequence[Tensor]] = [torch.split(query, lengths)]
        if self.context_size == 1:
            # one split, not a slice a block, since the backward of every slice would fill a tensor of all tokens
            wholes += [torch.split(whole, lengths) for whole in (key, value)]
        else:
            wholes += [[block.keys_of(whole)[0] for block in blocks] for whole in (key, value)]
        outputs = []
        for block, *parts in zip(blocks, *wholes, strict=True):
            q, k, v = (torch.unflatten(part, 0, (block.num_sequences, -1)).transpose(1, 2) for part in parts)
            mask = block.mask(self.window, query.device)
            attended = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=self.scale,
                enable_gqa=self.grouped,
            )
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)

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


def _blocks(bounds: Sequence[int], prefixes: Sequence[Stretches], window: int) -> list[Block]:
    """All sequences over their own keys, then those with a prefix over its keys.

    Neighbours of one length are a block, as are neighbours with one prefix. Where a window ends within a sequence, what
    a query sees of a prefix depends on its place, so that each sequence with a prefix is a block over all of its keys.

    Args:
        bounds: where sequences start behind their prefixes, and at last the number of tokens.
        prefixes: ``PackedMicroBatch.prefixes``.
        window: keys that a query sees; 0: all up to its own place.
    """
    parts = [one for one in zip(itertools.pairwise(bounds), prefixes, strict=True) if one[0][0] < one[0][1]]
    ends_within = 0 < window < max(num_places(prefix) + end - start for (start, end), prefix in parts)
    blocks = []
    for (_, is_apart), group in itertools.groupby(
        parts, lambda one: (one[0][1] - one[0][0], ends_within and bool(one[1]))
    ):
        alike = list(group)
        if is_apart:
            blocks += [Block(part, (*prefix, part)) for part, prefix in alike]
        else:
            whole = (alike[0][0][0], alike[-1][0][1])
            blocks.append(Block(whole, (whole,), len(alike)))
    for prefix, group in itertools.groupby(parts, lambda one: () if ends_within else one[1]):
        places = [part for part, _ in group]
        if prefix:
            blocks.append(Block((places[0][0], places[-1][1]), prefix, sees_all=True))
    return blocks


class CPUAttention(torch.autograd.Function):
    """torch's kernel for CPUs, in float32 and with MKL's products, whatever the dtype and the library of the model's.

    Its products are small: in bfloat16, or by oneDNN, they take up to six times as long (docs/performance.md). What is
    kept for backward has the model's dtype, as the kernel itself would keep it, and every token once.

    The kernel gives the output ``o`` and, with ``l``, the logarithm of the softmax's sum of every query. Of two blocks
    of keys that a query sees, ``l = log(exp(l1) + exp(l2))`` and ``o = exp(l1 - l) o1 + exp(l2 - l) o2`` are those of
    both together; a sink is a block of one key with ``l2 = sink`` and ``o2 = 0``. The kernel's backward pass asks for
    ``o`` and ``l`` only, so that those of all blocks give it each block's probabilities. The sink's own is
    ``p = exp(sink - l)``, and its gradient the sum over queries of ``-p (o . gradient)``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        blocks: Sequence[Block],
        window: int,
        scale: float,
    ) -> Tensor:
        """Attends.

        Args:
            ctx: torch's.
            query: ``[p, heads, head_size]``.
            key: ``[P, groups, head_size]``.
            value: as ``key``.
            sinks: ``[heads]``; None: the model has none.
            blocks: each query is in one that sees not all, and may then be in others that do.
            window: keys that a query sees; 0: all up to its own place.
            scale: of the scores.

        Returns:
            As ``query``.
        """
        ctx.blocks, ctx.window, ctx.scale = blocks, window, scale
        output, sums = torch.empty(query.shape, dtype=torch.float32), torch.empty(query.shape[:2])
        with products_by_mkl():
            for block, bias in _biases(blocks, window):
                heads = (block.queries_of(query), block.keys_of(key), block.keys_of(value))
                found, found_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    *(one.transpose(1, 2).float() for one in heads),
                    0.0,
                    bias is None and not block.sees_all,
                    attn_mask=bias,
                    scale=scale,
                )
                merge = _merge if block.sees_all else _begin
                merge(block.queries_of(output), block.queries_of(sums), found.transpose(1, 2), found_sums.mT)
        if sinks is not None:
            with_sinks = torch.logaddexp(sums, sinks.float())
            output *= (sums - with_sinks).exp()[..., None]
            sums = with_sinks
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, sums, sinks)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query, key, value and sinks; of what several sequences read, the sum over them."""
        query, key, value, output, sums, sinks = ctx.saved_tensors
        of_query, of_key, of_value = (torch.zeros(one.shape, dtype=torch.float32) for one in (query, key, value))
        with products_by_mkl():
            for block, bias in _biases(ctx.blocks, ctx.window):
                packed = (block.queries_of(gradient), block.queries_of(query), block.keys_of(key), block.keys_of(value))
                q, k, v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    *(one.transpose(1, 2).float() for one in (*packed, block.queries_of(output))),
                    block.queries_of(sums).mT.contiguous(),
                    0.0,
                    bias is None and not block.sees_all,
                    attn_mask=bias,
                    scale=ctx.scale,
                )
                block.queries_of(of_query).add_(q.transpose(1, 2))
                block.add_keys(of_key, k.transpose(1, 2))
                block.add_keys(of_value, v.transpose(1, 2))
        of_sinks = None
        if sinks is not None:
            products = (gradient.float() * output.float()).sum(-1)
            of_sinks = -((sinks.float() - sums).exp() * products).sum(0).to(sinks.dtype)
        gradients = (one.to(query.dtype) for one in (of_query, of_key, of_value))
        return (*gradients, of_sinks, None, None, None)


def _begin(output: Tensor, sums: Tensor, found: Tensor, found_sums: Tensor) -> None:
    """Outputs ``[..., head_size]`` and logarithms ``[...]`` of the first block of keys, in place."""
    output.copy_(found)
    sums.copy_(found_sums)


def _merge(output: Tensor, sums: Tensor, found: Tensor, found_sums: Tensor) -> None:
    """Those of one more block."""
    both = torch.logaddexp(sums, found_sums)
    output.mul_((sums - both).exp()[..., None]).addcmul_(found, (found_sums - both).exp()[..., None])
    sums.copy_(both)


def _biases(blocks: Sequence[Block], window: int) -> Iterator[tuple[Block, Tensor | None]]:
    """Each block with what is added to its scores; None: nothing, but what the kernel's own mask says."""
    for block in blocks:
        mask = block.mask(window, torch.device("cpu"))
        yield block, None if mask is None else torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
