"""Routing replay: an update, and maybe its scoring pass, takes the experts that an earlier pass has taken.

A router that chooses anew chooses other experts for some tokens: after the first update of a step, since the weights
have moved, and beside the sampler even with equal weights, since both round differently. Then log-probs of the two
passes are of different computations. ``update.routing_replay='score'`` (R2) makes updates take the choices of the
scoring pass, ``'rollout'`` (R3) makes scoring and updates take the sampler's. Gradients reach the router through the
chosen experts' weights as ever.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gtpo_megatron.actor import cpu_platform
from gtpo_megatron.actor.model.replayed_router import ReplayedRouter, replay_routers
from gtpo_megatron.batch import RolloutBatch
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.data.packing import PackedMicroBatch
from gtpo_megatron.data.routing import Routing, RoutingLayout, routing_mismatch, unpack_routing
from gtpo_megatron.distributed.groups import ParallelGroups, RankCoordinates
from gtpo_megatron.errors import DataError
from gtpo_megatron.observability.metrics import Max, Metric
from gtpo_megatron.weights.experts import Experts


class RoutingReplay:
    """Keeps the experts of a step's tokens, and tells them to this rank's routers.

    Args:
        source: whose choices are replayed.
        compares: measure how often the scoring pass chooses other experts than the sampler.
        experts: experts of the model.
        chunks: the rank's parts of the model; their routers are given an object that can be told.
        parallel: the layout.
        coordinates: coordinates of this rank.
        groups: process groups of this rank.
    """

    def __init__(
        self,
        source: Literal["none", "score", "rollout"],
        *,
        compares: bool,
        experts: Experts,
        chunks: Sequence[Any],
        parallel: ParallelConfig,
        coordinates: RankCoordinates,
        groups: ParallelGroups,
    ) -> None:
        self._source = source
        self._compares = compares and source != "rollout"
        found: dict[int, ReplayedRouter] = {}
        for chunk in chunks:
            found |= replay_routers(chunk)
        numbers = [layer + 1 for layer, has_experts in enumerate(experts.layers) if has_experts]
        self._routers = [found[number] for number in numbers if number in found]
        self._num_routers = len(numbers)
        self._places = torch.tensor([i for i, number in enumerate(numbers) if number in found], dtype=torch.int64)
        self._coordinates = coordinates
        # inner to outer: tensor-parallel ranks share what a context-parallel rank holds
        self._groups = (groups.tp if parallel.sequence_parallel else None, groups.cp)
        self._layout = RoutingLayout(
            num_routers=len(self._routers),
            experts_per_token=experts.experts_per_token,
            num_experts=experts.num_experts,
            context_size=parallel.context_parallel_size,
            sequence_size=parallel.tensor_parallel_size if parallel.sequence_parallel else 1,
        )
        self._routing: Routing | None = None

    def begin_scoring(self, batches: Sequence[PackedMicroBatch], rollouts: RolloutBatch) -> None:
        """Before the scoring pass: gives the routers the sampler's choices, or starts to record theirs.

        Args:
            batches: micro-batches of the pass, in its order.
            rollouts: responses of this rank.

        Raises:
            DataError: the sampler sent no routing, or that of another model.
        """
        self.release()
        if self._source == "rollout":
            self._routing = self._sampled(rollouts)
            self._tell(batches)
        else:
            for router in self._routers:
                router.is_recording = True

    def end_scoring(self, batches: Sequence[PackedMicroBatch], rollouts: RolloutBatch) -> dict[str, Metric]:
        """After the scoring pass: keeps what its routers chose, if updates are to replay it.

        Args:
            batches: those of ``begin_scoring``.
            rollouts: responses of this rank.

        Returns:
            ``experts/routing_mismatch_frac``, if asked for; the same on every rank.

        Collectives: one gather of bytes over tp and cp; one sum of two numbers over the world, if it is measured.
        """
        self._forget_told()
        if self._source == "rollout":
            return {}
        routing = self._recorded(batches, rollouts)
        metrics = self._mismatch(routing, self._sampled(rollouts)) if self._compares else {}
        self._routing = routing if self._source == "score" else None
        return metrics

    def skip_scoring(self, rollouts: RolloutBatch) -> None:
        """In the place of the scoring pass, if there is none: keeps the sampler's choices, if updates replay them.

        Raises:
            DataError: as :meth:`begin_scoring`.
        """
        self.release()
        if self._source == "rollout":
            self._routing = self._sampled(rollouts)

    def begin_update(self, batches: Sequence[PackedMicroBatch]) -> None:
        """Before the passes of an update: its micro-batches' choices are told."""
        if self._source != "none":
            self._tell(batches)

    def end_update(self) -> None:
        """After the passes of an update."""
        self._forget_told()

    def release(self) -> None:
        """Frees the step's choices."""
        self._routing = None
        self._forget_told()

    def _forget_told(self) -> None:
        for router in self._routers:
            router.told = {}
            router.is_recording = False

    def _tell(self, batches: Sequence[PackedMicroBatch]) -> None:
        assert self._routing is not None, "scoring comes first"
        for number, batch in enumerate(batches):
            positions = self._layout.positions(batch, self._coordinates.context_index, self._sequence_index)
            told, is_told = (tensor[positions] for tensor in self._layout.pack(self._routing, batch))
            for index, router in enumerate(self._routers):
                router.told[number] = told[:, index].contiguous(), is_told

    @property
    def _sequence_index(self) -> int:
        return self._coordinates.tensor_index if self._layout.sequence_size > 1 else 0

    def _sampled(self, rollouts: RolloutBatch) -> Routing:
        """The sampler's choices in this rank's layers; it gives none of conversations, so no response has branches."""
        routed = rollouts.routed_experts
        if routed is None:
            raise DataError("the responses carry no routing; the engine must run with rollout.returns_routing=True")
        if routed.shape[1:] != (self._num_routers, self._layout.experts_per_token):
            raise DataError(
                f"the sampler's routing is of {routed.shape[1]} routers with {routed.shape[2]} experts per token, the "
                f"trainer's has {self._num_routers} with {self._layout.experts_per_token}; do both have the same model?"
            )
        rows = torch.split(routed[:, self._places], rollouts.routed_lengths.tolist())
        return {(row, 0): one for row, one in enumerate(rows)}

    def _recorded(self, batches: Sequence[PackedMicroBatch], rollouts: RolloutBatch) -> Routing:
        """The choices of all ranks that share a sequence's tokens."""
        chosen = torch.cat(
            [
                torch.stack([router.chosen.pop(number) for router in self._routers], dim=1).to(self._layout.dtype)
                if self._routers
                else self._nothing(batch)
                for number, batch in enumerate(batches)
            ]
        )
        every = _gathered(_gathered(chosen.contiguous()[None], self._groups[0]), self._groups[1]).cpu()
        lengths = {row: rollouts.sequence_lengths(row) for row in range(rollouts.num_responses)}
        routing: dict[tuple[int, int], Tensor] = {}
        start = 0
        for batch in batches:
            count = len(batch.input_ids) // self._layout.sequence_size
            packed = every.new_empty(int(batch.cu_seqlens[-1]), *every.shape[2:])
            for rank, part in enumerate(every[:, start : start + count]):
                context, sequence = divmod(rank, self._layout.sequence_size)
                packed[self._layout.positions(batch, context, sequence)] = part
            routing |= unpack_routing(packed, batch, lengths)
            start += count
        return routing

    def _nothing(self, batch: PackedMicroBatch) -> Tensor:
        """``[s, 0, k]``: a pipeline stage may have no layers with experts."""
        count = len(batch.input_ids) // self._layout.sequence_size
        shape = count, 0, self._layout.experts_per_token
        return torch.zeros(shape, dtype=self._layout.dtype, device=cpu_platform.device())

    def _mismatch(self, ours: Routing, theirs: Routing) -> dict[str, Metric]:
        counts = torch.zeros(2, dtype=torch.int64, device=cpu_platform.device())
        # ranks that share sequences all hold the same rows
        if self._coordinates.tensor_index == self._coordinates.context_index == 0:
            for sequence, sampled in theirs.items():
                differs = routing_mismatch(ours[sequence][: len(sampled)], sampled)
                counts += torch.tensor([int(differs.sum()), differs.numel()], device=counts.device)
        dist.all_reduce(counts)
        return {"experts/routing_mismatch_frac": Max(float(counts[0]) / max(float(counts[1]), 1.0))}


def _gathered(parts: Tensor, group: ProcessGroup | None) -> Tensor:
    """``[ranks x n, ...]`` of ``[n, ...]``, in the order of the group's ranks; they travel as bytes."""
    if group is None:
        return parts
    mine = parts.view(torch.uint8)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return torch.cat(every).view(parts.dtype)
