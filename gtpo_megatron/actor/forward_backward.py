"""Cuts a rank's responses into packed micro-batches, and runs these through Megatron's pipeline schedules."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor
from torch.distributed import ProcessGroup

from gtpo_megatron.actor import cpu_platform
from gtpo_megatron.actor.model.core_attention import PREFIXES
from gtpo_megatron.actor.model.replayed_router import NUMBER
from gtpo_megatron.batch import RolloutBatch
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.data.packing import PackedMicroBatch, PackLayout, micro_batches, pack
from gtpo_megatron.distributed.groups import ParallelGroups
from gtpo_megatron.kernels.cpu_products import BackwardPasses
from gtpo_megatron.weights.architecture import Architecture

R = TypeVar("R")

MIN_PREFIX_TOKENS = 16
"""A shorter prefix saves little, and costs a call of the attention in every layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatching:
    """Cuts a rank's responses.

    Attributes:
        budget_tokens: largest number of tokens of a micro-batch.
        layout: layout of packed sequences.
        even_group: ranks that must make equally many passes; None: ranks may make different numbers.
    """

    budget_tokens: int
    layout: PackLayout
    even_group: ProcessGroup | None = None

    @classmethod
    def of(
        cls,
        parallel: ParallelConfig,
        groups: ParallelGroups,
        *,
        context_index: int,
        budget_tokens: int,
        models: Sequence[Architecture],
        share_weights: bool = False,
    ) -> "MicroBatching":
        """Micro-batching for a layout of ranks, and for all models that will run them.

        If replicas share experts or frozen weights, every pass of one is a pass of the other. The maximum is taken over
        all replicas rather than those that share experts: a step waits for the slowest of all in any case.
        """
        return cls(
            budget_tokens=budget_tokens,
            layout=PackLayout.of(parallel, context_index, min_prefix_tokens=min_prefix_tokens(parallel, models)),
            even_group=groups.dp if parallel.replicas_share_experts or share_weights else None,
        )

    def cut(self, rollouts: RolloutBatch, rows: Sequence[int], *, are_together: bool = False) -> list[PackedMicroBatch]:
        """The given rows, cut and packed; at the end micro-batches of padding, which no loss and no score counts.

        Args:
            rollouts: this rank's responses.
            rows: some of them.
            are_together: no two micro-batches share a response, whatever the budget.

        Collectives: one maximum of one number over ``even_group``.
        """
        batches = micro_batches(
            rollouts, rows, budget_tokens=self.budget_tokens, layout=self.layout, are_together=are_together
        )
        if self.even_group is not None:
            most = torch.tensor(len(batches), device=cpu_platform.device())
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.even_group)
            batches += [pack(rollouts, [], layout=self.layout)] * (int(most) - len(batches))
        return batches


def min_prefix_tokens(parallel: ParallelConfig, models: Sequence[Architecture]) -> int:
    """Fewest tokens of a prefix that sequences share; 0: every sequence has all of its tokens.

    ``PackedSDPA`` reads the keys and values of a shared prefix, on a CPU and with all tokens on a rank; other kernels
    are given whole sequences. A delta net has a state in the place of keys, and a mixture's balance counts the tokens
    of all sequences.
    """
    can_share = cpu_platform.is_cpu() and parallel.context_parallel_size == 1
    return MIN_PREFIX_TOKENS if can_share and all(one.delta is None and one.experts is None for one in models) else 0


FinishMicroBatch = Callable[[Tensor, PackedMicroBatch], tuple[Tensor, R]]
"""From the last stage's hidden states to the micro-batch's part of the loss (a scalar, already divided by the global
weight) and whatever is to be kept of it."""


def run_micro_batches(
    chunks: Sequence[Any], batches: Sequence[PackedMicroBatch], finish: FinishMicroBatch[R], *, forward_only: bool
) -> list[R]:
    """Forward, and backward unless ``forward_only``, over every micro-batch.

    Gradients are left in Megatron's buffers, summed over micro-batches, data-parallel ranks and shared embeddings;
    nothing divides them: Megatron's token count is reported as 0, which switches its own division off.

    Args:
        chunks: Megatron's data-parallel wrappers of this rank's ``PolicyModel`` chunks; several are interleaved.
        batches: at least one, and at least one per stage if chunks are interleaved; the same cuts on all ranks
            of a pipeline, and equally many on all ranks that share experts.
        finish: called on the last pipeline stage only.
        forward_only: no gradients, no gradient communication.

    Returns:
        What ``finish`` kept, one item per micro-batch; nothing on other stages than the last.

    Collectives: Megatron's own, over tp and pp, and over ep if the model has experts; with gradients also
        over dp.
    """
    device = cpu_platform.device()
    # Transformer Engine's kernels read where sequences start on the device; local layers ask for it as numbers, each of
    # them several times, and would wait for the device before they start their next kernel
    bounds_device = device if cpu_platform.has_transformer_engine() else torch.device("cpu")

    backward_passes = BackwardPasses()

    def forward_step(numbered: Iterator[tuple[int, PackedMicroBatch]], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
        backward_passes.end()
        number, batch = next(numbered)
        cu_seqlens = batch.cu_seqlens.to(bounds_device, non_blocking=True)
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=batch.max_sequence_tokens,
            max_seqlen_kv=batch.max_sequence_tokens,
        )
        setattr(packed, NUMBER, number)
        setattr(packed, PREFIXES, batch.prefixes)
        hidden = chunk(
            batch.input_ids.to(device, non_blocking=True)[None],
            batch.position_ids.to(device, non_blocking=True)[None],
            None,
            packed_seq_params=packed,
            **_padding_mask(chunk, batch),
        )
        backward_passes.begin_with(hidden)
        return hidden, partial(_finish, batch)

    def _finish(batch: PackedMicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, R]:
        loss, kept = finish(hidden, batch)
        backward_passes.begin_with(loss)
        return loss, torch.zeros([], dtype=torch.int, device=device), kept

    if len(chunks) > 1:
        config = get_model_config(chunks[0])
        config.microbatch_group_size_per_vp_stage = interleaved_group_size(
            len(batches), config.pipeline_model_parallel_size
        )
    longest = max(int(batch.cu_seqlens[-1]) for batch in batches)
    try:
        with torch.set_grad_enabled(not forward_only):
            kept: list[R] = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(enumerate(batches)) for _ in chunks],
                model=list(chunks),
                num_microbatches=len(batches),
                seq_length=longest,
                micro_batch_size=1,
                forward_only=forward_only,
            )
    finally:
        backward_passes.end()
    return kept


def _padding_mask(chunk: Any, batch: PackedMicroBatch) -> dict[str, Tensor]:
    """The argument by which routers know padding, ``[1, p]`` bool; nothing for a dense model.

    Under sequence parallelism Megatron cuts it on the first pipeline stage, and takes it as it is on the others.
    """
    config = get_model_config(chunk)
    if config.num_moe_experts is None:
        return {}
    mask = batch.is_padding.to(cpu_platform.device(), non_blocking=True)
    if config.sequence_parallel and not get_attr_wrapped_model(chunk, "pre_process"):
        mask = mask.chunk(config.tensor_model_parallel_size)[parallel_state.get_tensor_model_parallel_rank()]
    return {"padding_mask": mask[None]}


def interleaved_group_size(num_micro_batches: int, num_stages: int) -> int:
    """How many micro-batches in a row an interleaved pipeline gives one model chunk before the next chunk's turn.

    Megatron wants at least one a stage in every group, the last one included. The smallest such size holds the fewest
    activations; any number of micro-batches from ``num_stages`` on has one, so none has to be added for it.

    Args:
        num_micro_batches: at least ``num_stages``.
        num_stages: pipeline ranks.
    """
    return next(
        size
        for size in range(num_stages, num_micro_batches + 1)
        if num_micro_batches % size == 0 or num_micro_batches % size >= num_stages
    )
