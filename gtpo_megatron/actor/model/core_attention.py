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

from gtpo_megatron.actor.cpu_products import products_by_mkl
from gtpo_megatron.data.packing import Stretches, held_positions, num_places
from gtpo_megatron.errors import ConfigError

SHARED = "gtpo_shared"
"""Attribute of ``packed_seq_params``: ``PackedMicroBatch.shared``; without it sequences have all of their tokens."""


class Run(NamedTuple):
    """Neighbouring sequences of one length that share the same tokens, or a part of one sequence.

    Attributes:
        queries: first and last-plus-one packed place of the sequences' queries.
        keys: of their own keys. The last query of a sequence sees all of its keys, the one before all but the last.
        count: sequences.
        shared: packed stretches of the keys before each one's own.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    count: int = 1
    shared: Stretches = ()

    @property
    def num_queries(self) -> int:
        """Of one sequence."""
        return (self.queries[1] - self.queries[0]) // self.count

    @property
    def num_keys(self) -> int:
        """Of one sequence, with those that it shares."""
        return num_places(self.shared) + (self.keys[1] - self.keys[0]) // self.count

    def queries_of(self, packed: Tensor) -> Tensor:
        """``[P, ...]`` -> ``[count, num_queries, ...]``."""
        return packed[slice(*self.queries)].unflatten(0, (self.count, -1))

    def keys_of(self, packed: Tensor) -> Tensor:
        """``[P, ...]`` -> ``[count, num_keys, ...]``."""
        own = packed[slice(*self.keys)].unflatten(0, (self.count, -1))
        if not self.shared:
            return own
        before = torch.cat([packed[start:end] for start, end in self.shared])
        return torch.cat([before.expand(self.count, *before.shape), own], dim=1)

    def add_keys(self, packed: Tensor, gradients: Tensor) -> None:
        """Adds ``[count, num_keys, ...]`` to ``[P, ...]``: the transpose of :meth:`keys_of`."""
        before, own = gradients.split([num_places(self.shared), gradients.shape[1] - num_places(self.shared)], dim=1)
        packed[slice(*self.keys)] += own.flatten(0, 1)
        if self.shared:
            parts = before.sum(0).split([end - start for start, end in self.shared])
            for (start, end), part in zip(self.shared, parts, strict=True):
                packed[start:end] += part

    def mask(self, window: int) -> Tensor | None:
        """``[num_queries, num_keys]`` bool, which keys a query sees; None if those up to its own place alone say it."""
        before = self.num_keys - self.num_queries
        if not before and not 0 < window < self.num_keys:
            return None
        everything = torch.ones(self.num_queries, self.num_keys, dtype=torch.bool)
        return everything.tril(before).triu(before - (window or self.num_keys) + 1)


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
        value_size = value.shape[-1]
        if value_size < key.shape[-1]:  # the kernels know one size only
            value = F.pad(value, (0, key.shape[-1] - value_size))
        if self.context_size == 1:
            runs = _runs(bounds, getattr(packed_seq_params, SHARED, ()))
        else:
            runs = self._held_runs(bounds)
            whole = self._gather(torch.cat([key, value], dim=-1), bounds)
            key, value = torch.split(whole, [key.shape[-1], value.shape[-1]], dim=-1)
        if query.is_cuda:
            attended = self._by_torch(query, key, value, runs)
        else:
            attended = CPUAttention.apply(  # type: ignore[no-untyped-call]
                query, key, value, self.softmax_offset, runs, self.window, self.scale
            )
        return attended[..., :value_size].flatten(1)

    def _held_runs(self, bounds: Sequence[int]) -> list[Run]:
        """This rank's two chunks of every sequence, over the keys of all ranks."""
        runs = []
        for start, end in itertools.pairwise(bounds):
            chunk, first = (end - start) // (2 * self.context_size), start // self.context_size
            for index in (self.context_index, 2 * self.context_size - 1 - self.context_index):
                runs.append(Run((first, first + chunk), (start, start + (index + 1) * chunk)))
                first += chunk
        return runs

    def _by_torch(self, query: Tensor, key: Tensor, value: Tensor, runs: Sequence[Run]) -> Tensor:
        """``[p, heads / tp, head_size]``, where nothing is shared."""
        if self.softmax_offset is not None:
            raise ConfigError("attention sinks need Transformer Engine on a GPU; install it")
        queries = torch.split(query, [run.queries[1] - run.queries[0] for run in runs])
        if self.context_size == 1:
            # one split, not a slice a run, since the backward of every slice would fill a tensor of all tokens
            keys, values = (torch.split(whole, [len(part) for part in queries]) for whole in (key, value))
        else:
            keys, values = ([whole[slice(*run.keys)] for run in runs] for whole in (key, value))
        outputs = []
        for run, *parts in zip(runs, queries, keys, values, strict=True):
            q, k, v = (part.unflatten(0, (run.count, -1)).transpose(1, 2) for part in parts)
            mask = run.mask(self.window)
            if mask is not None:
                mask = mask.to(query.device)
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=self.grouped
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


def _runs(bounds: Sequence[int], shared: Sequence[Stretches]) -> list[Run]:
    """The sequences, neighbours of one length that share the same tokens together."""
    parts = list(itertools.pairwise(bounds))
    alike = itertools.groupby(
        zip(parts, shared or [()] * len(parts), strict=True), lambda one: (one[0][1] - one[0][0], one[1])
    )
    runs = []
    for (length, stretches), group in alike:
        places = [part for part, _ in group]
        if length:
            whole = (places[0][0], places[-1][1])
            runs.append(Run(whole, whole, len(places), stretches))
    return runs


class CPUAttention(torch.autograd.Function):
    """torch's kernel for CPUs, in float32 and with MKL's products, whatever the dtype and the library of the model's.

    Its products are small: in bfloat16, or by oneDNN, they take up to six times as long (docs/performance.md). What is
    kept for backward has the model's dtype, as the kernel itself would keep it, and each token once, also a shared one.

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
        sinks: Tensor | None,
        runs: Sequence[Run],
        window: int,
        scale: float,
    ) -> Tensor:
        """Attends.

        Args:
            ctx: torch's.
            query: ``[p, heads, head_size]``.
            key: ``[P, groups, head_size]``.
            value: as ``key``.
            sinks: ``[heads]``.
            runs: all queries, in their order.
            window: keys that a query sees; 0: all up to its own place.
            scale: of the scores.

        Returns:
            As ``query``.
        """
        ctx.runs, ctx.window, ctx.scale = runs, window, scale
        output, sums = torch.empty_like(query, memory_format=torch.contiguous_format), []
        with products_by_mkl():
            for run, bias in _biases(runs, window):
                heads = (run.queries_of(query), run.keys_of(key), run.keys_of(value))
                attended, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    *(one.transpose(1, 2).float() for one in heads), 0.0, bias is None, attn_mask=bias, scale=scale
                )
                if sinks is not None:
                    with_sinks = torch.logaddexp(logsumexp, sinks.float()[:, None])
                    attended = attended * (logsumexp - with_sinks).exp()[..., None]
                    logsumexp = with_sinks
                run.queries_of(output).copy_(attended.transpose(1, 2))
                sums.append(logsumexp)
        ctx.save_for_backward(query, key, value, output, sinks, *sums)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query, key, value and sinks; of shared keys and values the sum over all who read them."""
        query, key, value, output, sinks, *sums = ctx.saved_tensors
        of_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        of_key, of_value = (torch.zeros(one.shape, dtype=torch.float32) for one in (key, value))
        of_sinks = None if sinks is None else torch.zeros(sinks.shape)
        with products_by_mkl():
            for (run, bias), logsumexp in zip(_biases(ctx.runs, ctx.window), sums, strict=True):
                packed = (run.queries_of(gradient), run.queries_of(query), run.keys_of(key), run.keys_of(value))
                heads = [one.transpose(1, 2).float() for one in (*packed, run.queries_of(output))]
                if of_sinks is not None:
                    products = (heads[0] * heads[-1]).sum(-1)
                    of_sinks -= ((sinks.float()[:, None] - logsumexp).exp() * products).sum((0, 2))
                q, k, v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    *heads, logsumexp, 0.0, bias is None, attn_mask=bias, scale=ctx.scale
                )
                run.queries_of(of_query).copy_(q.transpose(1, 2))
                run.add_keys(of_key, k.transpose(1, 2))
                run.add_keys(of_value, v.transpose(1, 2))
        if of_sinks is not None:
            of_sinks = of_sinks.to(sinks.dtype)
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), of_sinks, None, None, None


def _biases(runs: Sequence[Run], window: int) -> Iterator[tuple[Run, Tensor | None]]:
    """Each run with what is added to its scores; None: the kernel's own causal mask is enough."""
    made: dict[tuple[int, int], Tensor | None] = {}
    for run in runs:
        shape = run.num_queries, run.num_keys
        if shape not in made:
            mask = run.mask(window)
            made[shape] = None if mask is None else torch.zeros(shape).masked_fill_(~mask, -torch.inf)
        yield run, made[shape]
