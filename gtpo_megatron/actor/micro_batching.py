"""How a rank cuts responses into micro-batches, and how many passes it makes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from gtpo_megatron.actor import cpu_platform
from gtpo_megatron.batch import RolloutBatch
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.data.packing import PackedMicroBatch, PackLayout, micro_batches, pack
from gtpo_megatron.distributed.groups import ParallelGroups


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatching:
    """Cuts a rank's responses.

    Attributes:
        budget_tokens: of a micro-batch.
        layout: of packed sequences.
        even_group: ranks that must make equally many passes; None: ranks may make different numbers.
    """

    budget_tokens: int
    layout: PackLayout
    even_group: ProcessGroup | None = None

    @classmethod
    def of(
        cls, parallel: ParallelConfig, groups: ParallelGroups, *, context_index: int, budget_tokens: int
    ) -> "MicroBatching":
        """Micro-batching for a layout of ranks.

        If replicas share experts, every pass of one is a pass of the other. The maximum is taken over all replicas
        rather than those that share experts: a step waits for the slowest of all in any case.
        """
        return cls(
            budget_tokens=budget_tokens,
            layout=PackLayout.of(parallel, context_index),
            even_group=groups.dp if parallel.replicas_share_experts else None,
        )

    def cut(self, rollouts: RolloutBatch, rows: Sequence[int]) -> list[PackedMicroBatch]:
        """The given rows, cut and packed; at the end micro-batches of padding, which no loss and no score counts.

        Collectives: one maximum of one number over ``even_group``.
        """
        batches = micro_batches(rollouts, rows, budget_tokens=self.budget_tokens, layout=self.layout)
        if self.even_group is not None:
            most = torch.tensor(len(batches), device=cpu_platform.device())
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.even_group)
            batches += [pack(rollouts, [], layout=self.layout)] * (int(most) - len(batches))
        return batches
