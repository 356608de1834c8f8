"""Chooses which of the ranks that all hold a shard sends to which worker, and which of its slices.

Replicas of a shard send equal numbers of bytes, and as few of them as that allows send to one worker: each pair of
processes that talk needs a connection. Each worker's bytes of a shard are a range, one worker's after the other's. The
whole is cut into as many equal segments as there are replicas, and a replica sends what is in its segment. If a
worker's range is in several segments, its slices are assigned to their replicas in proportion.

If workers are on the ranks' GPUs, a worker takes what its own rank holds from that rank. Ranges are sorted by the
data-parallel column of the workers' own ranks: if all columns have equally many workers, a worker takes everything
from ranks of its own column.

This needs no more than the layout and the bytes that workers of each kind want of a shard. So every process finds the
same answer, for the few shards and workers that concern it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gtpo_megatron.errors import WeightMappingError
from gtpo_megatron.weights.push.layout import PushLayout, SourceRank, TargetWorker, WorkerCoordinates
from gtpo_megatron.weights.push.sections import Section, Sections, hf_names

_LEAST_PART = 64
"""A replica is not asked for less than one of so many equal parts of what a replica sends to a worker at most."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the model that replicas hold in common.

    Attributes:
        stage: stage of the pipeline.
        has_experts: whether it is of experts; else it is everything that is none.
        number: number among the parts that a section of the stage is split into.
    """

    stage: int
    has_experts: bool
    number: int


Senders = tuple[tuple[int, int], ...]
"""Rank and bytes, for every replica that sends to a worker."""


class Replicas:
    """Decides which of a shard's replicas send to which workers.

    Args:
        layout: layout of the push.
        sections: sections of the model.

    Raises:
        WeightMappingError: a shard that is wanted is on no rank.
    """

    def __init__(self, layout: PushLayout, sections: Sections) -> None:
        self._layout, self._sections = layout, sections
        self._is_by_host = layout.sender_policy == "same_host"
        self._holders: dict[Shard, list[SourceRank]] = {}
        for source in layout.sources:
            for shard in self.shards_of(source):
                self._holders.setdefault(shard, []).append(source)
        self._coordinates = list(dict.fromkeys(target.coordinates for target in layout.targets))
        self._ordered: dict[tuple[bool, str], list[TargetWorker]] = {}
        self._turns: dict[int, int] = {}
        self._found: dict[tuple[Shard, int], Senders] = {}
        self._own: dict[Shard, dict[int, int]] = {}
        self._ranges: dict[tuple[bool, str, tuple[int, ...]], tuple[dict[int, int], int]] = {}
        self._wanted: dict[Shard, dict[WorkerCoordinates, int]] = {}
        self._check_cover()

    def shards_of(self, source: SourceRank) -> list[Shard]:
        """The shards of a rank."""
        coordinates, stage = source.coordinates, source.coordinates.pipeline_stage
        shards = [Shard(stage, False, coordinates.tensor_parallel.index)]
        if any(section.has_experts for section in self._sections.of_pipeline_stage(stage)):
            expert_tensor = coordinates.expert_tensor_parallel
            number = coordinates.expert_parallel.index * expert_tensor.size + expert_tensor.index
            shards.append(Shard(stage, True, number))
        return shards

    def turn(self, target: TargetWorker) -> int:
        """A worker's place in the order among those of its coordinates."""
        if target.worker not in self._turns:
            taken = dict.fromkeys(self._coordinates, 0)
            for one in self._in_order(False, self._region(target)):
                self._turns[one.worker] = taken[one.coordinates]
                taken[one.coordinates] += 1
        return self._turns[target.worker]

    def senders(self, shard: Shard, target: TargetWorker) -> Senders:
        """Returns the ranks that send a shard to a worker; none if the worker wants nothing of it."""
        key = (shard, target.worker)
        if key not in self._found:
            self._found[key] = self._senders(shard, target)
        return self._found[key]

    def served(self, shard: Shard, source: SourceRank) -> Iterator[tuple[TargetWorker, Senders]]:
        """The workers that a rank sends its shard to, with all their senders of it."""
        region = source.host if self._is_by_host else ""
        for target in self._in_order(shard.has_experts, region):
            senders = self._senders(shard, target)
            if any(rank == source.rank for rank, _ in senders):
                yield target, senders

    def _region(self, target: TargetWorker) -> str:
        return target.host if self._is_by_host else ""

    def _in_order(self, has_experts: bool, region: str) -> list[TargetWorker]:
        """The workers of a region in the order of their byte ranges."""
        key = (has_experts, region)
        if key not in self._ordered:
            columns = self._columns(has_experts) if self._layout.sender_policy == "own_rank_first" else {}
            members = [target for target in self._layout.targets if self._region(target) == region]
            self._ordered[key] = sorted(members, key=lambda target: (columns.get(target.worker, 0), target.worker))
        return self._ordered[key]

    def _columns(self, has_experts: bool) -> dict[int, int]:
        """Rank -> its number among the replicas of its shard."""
        shards = [ranks for shard, ranks in self._holders.items() if shard.has_experts == has_experts]
        return {source.rank: column for ranks in shards for column, source in enumerate(ranks)}

    def _demand(self, shard: Shard) -> dict[WorkerCoordinates, int]:
        """Bytes that a worker of each kind wants of a shard."""
        if shard not in self._wanted:
            sections = [
                section
                for section in self._sections.of_pipeline_stage(shard.stage)
                if section.has_experts == shard.has_experts
            ]
            self._wanted[shard] = {
                kind: sum(self._sections.sizes(section, kind).shard_bytes(shard.number) for section in sections)
                for kind in self._coordinates
            }
        return self._wanted[shard]

    def _senders(self, shard: Shard, target: TargetWorker) -> Senders:
        wanted, region = self._demand(shard)[target.coordinates], self._region(target)
        if not wanted:
            return ()
        own = self._sent_by_own_rank(shard)
        if target.worker in own:
            return ((target.worker, wanted),)
        able = [source.rank for source in self._holders[shard] if not self._is_by_host or source.host == region]
        if not able:
            raise WeightMappingError(self._no_sender(shard, target))
        starts, total = self._byte_ranges(shard, region)
        start = starts[target.worker]
        before = sum(size for worker, size in own.items() if starts[worker] < start)
        return _segments(able, start - before, wanted, total - sum(own.values()))

    def _sent_by_own_rank(self, shard: Shard) -> dict[int, int]:
        """Workers that no replica need serve, since their own ranks have the shard, and the bytes that they want."""
        if self._layout.sender_policy != "own_rank_first":
            return {}
        if shard not in self._own:
            ranks, demand = {source.rank for source in self._holders[shard]}, self._demand(shard)
            members = self._in_order(shard.has_experts, "")
            self._own[shard] = {one.worker: demand[one.coordinates] for one in members if one.worker in ranks}
        return self._own[shard]

    def _byte_ranges(self, shard: Shard, region: str) -> tuple[dict[int, int], int]:
        """Start of each worker's range, as if replicas served all of them, and the length of all ranges."""
        demand = self._demand(shard)
        key = (shard.has_experts, region, tuple(demand.values()))  # equal for most shards
        if key not in self._ranges:
            total, starts = 0, {}
            for target in self._in_order(shard.has_experts, region):
                starts[target.worker] = total
                total += demand[target.coordinates]
            self._ranges[key] = starts, total
        return self._ranges[key]

    def _check_cover(self) -> None:
        """Raises WeightMappingError if a shard that somebody wants is on no rank."""
        shape = self._sections.shape
        for stage in range(shape.num_stages):
            for section in self._sections.of_stage(stage):
                num_shards = shape.expert * shape.expert_tensor if section.has_experts else shape.tensor
                held = [
                    Shard(stage % shape.pipeline, section.has_experts, number) in self._holders
                    for number in range(num_shards)
                ]
                if not all(held):
                    self._complain(section, held)

    def _complain(self, section: Section, held: Sequence[bool]) -> None:
        split = self._sections.shape.expert_tensor if section.has_experts else 1
        for group in range(len(held) // split if section.has_experts else 1):
            for mapping in self._sections.mappings(section, group):
                for kind in self._coordinates:
                    slices = self._sections.slices(mapping, kind)
                    for number, name in enumerate(hf_names(mapping)):
                        areas = [(one.shard, one.there.num_elements) for one in slices if one.name == number]
                        wanted = sum(area for _, area in areas)
                        there = sum(area for shard, area in areas if held[group * split + shard])
                        if there != wanted:
                            raise WeightMappingError(
                                f"{name}: the trainer's ranks hold {there} of the {wanted} elements that a worker "
                                f"needs; do the sources cover every pipeline stage, tensor rank and expert rank?"
                            )

    def _no_sender(self, shard: Shard, target: TargetWorker) -> str:
        section = next(s for s in self._sections.of_pipeline_stage(shard.stage) if s.has_experts == shard.has_experts)
        name = self._sections.copies(section, shard.number, target.coordinates)[0].hf_name
        holders = ", ".join(f"rank {source.rank} ({source.host!r})" for source in self._holders[shard])
        return (
            f"{name}: {target} on host {target.host!r} can take weights from ranks on its own machine only, and none "
            f"of them holds this shard (it is on {holders}); use weight_sync.transport='process_group', or place the "
            f"engine beside a whole replica"
        )


def _segments(ranks: Sequence[int], start: int, wanted: int, total: int) -> Senders:
    """The replicas whose equal segments of ``[0, total)`` overlap ``[start, start + wanted)``."""
    num = len(ranks)
    found: list[tuple[int, int]] = []
    for index in range(start * num // total, num):
        first, end = index * total // num, (index + 1) * total // num
        if first >= start + wanted:
            break
        if (shared := min(end, start + wanted) - max(first, start)) > 0:
            found.append((ranks[index], shared))
    least = min(wanted, total // num) // _LEAST_PART
    return tuple((rank, shared) for rank, shared in found if shared >= least)


def assign_slices(slice_bytes: Sequence[int], senders: Senders) -> list[int]:
    """The rank that sends each slice, so that at any time all have sent in proportion to their bytes."""
    if len(senders) == 1:
        return [senders[0][0]] * len(slice_bytes)
    total, done = sum(num for _, num in senders), 0
    given = [0] * len(senders)
    chosen: list[int] = []
    for size in slice_bytes:
        done += size
        behind = [num * done - sent * total for (_, num), sent in zip(senders, given, strict=True)]
        index = behind.index(max(behind))
        given[index] += size
        chosen.append(senders[index][0])
    return chosen
