"""The whole plan of a push, slowly: every rank's copies against every worker's boxes, the rules in fractions.

``whole_plan`` follows the rules of ``gtpo_megatron.weights.push`` and has every worker's stream. ``least_sent`` is
another rule of who sends: of the replicas the one that has sent least so far, over all workers. It balances as well as
any, and needs the whole plan; it says how far from that the rule of segments may be.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from fractions import Fraction

from gtpo_megatron.weights.param_mapping import Box, ExpertParallel, SliceCopy, TensorParallel, expert_of
from gtpo_megatron.weights.push.plan import Bucket, Slice, Stream, kept_boxes
from gtpo_megatron.weights.reshard import load_plan, stage_mappings


def dense_shard(coordinates):
    """Equal on all ranks with the same dense parameters: the coordinates without what concerns experts only."""
    return replace(coordinates, expert_parallel=ExpertParallel(1, 0), expert_tensor_parallel=TensorParallel(1, 0))


def expert_shard(coordinates):
    """Equal on all ranks with the same experts: the coordinates without what concerns dense parameters only."""
    return replace(coordinates, tensor_parallel=TensorParallel(1, 0))


@dataclass(frozen=True)
class Holding:
    """A copy that the ranks of one shard have.

    Attributes:
        section: virtual stage, and whether it is of an expert.
        turn: its position in the section.
        shard: number of the shard in the section.
        ranks: that have it.
        copy: the boxes.
        is_everywhere: all shards have it.
    """

    section: tuple[int, bool]
    turn: tuple[int, ...]
    shard: int
    ranks: tuple[int, ...]
    copy: SliceCopy
    is_everywhere: bool


def holdings(arch, layout):
    """Every copy of every shard, each shard once."""
    ranks = defaultdict(list)
    for source in layout.sources:
        for is_expert in (False, True):
            ranks[
                (expert_shard(source.coordinates) if is_expert else dense_shard(source.coordinates), is_expert)
            ].append(source.rank)
    order = {name: number for number, name in enumerate(names(arch))}
    found = []
    for source in layout.sources:
        coordinates = source.coordinates
        mappings = list(stage_mappings(arch, coordinates, layout.padded_vocab_size))
        experts = {mapping.megatron_name: expert_of(mapping) for mapping in mappings}
        places = {mapping.megatron_name: place for place, mapping in enumerate(mappings)}
        for copy in load_plan(arch, coordinates, layout.padded_vocab_size):
            expert = experts[copy.megatron_name]
            holders = ranks[
                (dense_shard(coordinates) if expert is None else expert_shard(coordinates), expert is not None)
            ]
            if holders[0] != source.rank or (
                arch.tied_embeddings and copy.megatron_name.endswith("output_layer.weight")
            ):
                continue
            chunk = int(copy.megatron_name.split(".")[1]) if coordinates.virtual_size > 1 else 0
            section = (chunk * coordinates.pipeline_size + coordinates.pipeline_stage, expert is not None)
            if expert is None:
                # several parameters may be of one tensor of Hugging Face's, as a delta net's convolution is
                turn, shard = (places[copy.megatron_name], order[copy.hf_name]), coordinates.tensor_parallel.index
            else:
                group, local = divmod(expert, arch.experts.num_experts // coordinates.expert_parallel.size)
                layer = int(copy.hf_name.split(".")[2])
                turn = (layer, local, group, order[copy.hf_name])
                split = coordinates.expert_tensor_parallel
                shard = group * split.size + split.index
            whole = (
                *("norm", ".gate.", "e_score_correction_bias", ".q_a_proj.", ".kv_a_proj_with_mqa."),
                *(
                    ".shared_expert_gate.",
                    ".linear_attn.in_proj_ba.",
                    ".linear_attn.in_proj_b.",
                    ".linear_attn.in_proj_a.",
                ),
            )
            everywhere = expert is None and any(part in copy.hf_name for part in whole)
            found.append(Holding(section, turn, shard, tuple(holders), copy, everywhere))
    return found


def names(arch):
    """Hugging Face's names, in the order of the model."""
    from gtpo_megatron.weights.reshard import hf_shapes

    return list(hf_shapes(arch))


def size_of(name, box, layout):
    item = 4 if name.endswith("e_score_correction_bias") else layout.itemsize
    return -(-box.num_elements * item // 64) * 64


def parts_of(target, kept, found, layout):
    """What a worker takes: ``(holding, copy)`` in the order of sections and turns."""
    tensor = layout.sources[0].coordinates.tensor_parallel.size
    parts = []
    for one in sorted(found, key=lambda one: (one.section, one.turn, one.shard)):
        name, here, there = one.copy.hf_name, one.copy.megatron_box, one.copy.hf_box
        near = target.coordinates.tensor_parallel.index * tensor // target.coordinates.tensor_parallel.size
        if one.is_everywhere and one.shard != near:
            continue
        for mine in kept.get(name, ()):
            rows = range(max(there.row, mine.row), min(there.row + there.num_rows, mine.row + mine.num_rows))
            columns = range(
                max(there.column, mine.column),
                min(there.column + there.num_columns, mine.column + mine.num_columns),
            )
            if not rows or not columns:
                continue
            item = 4 if name.endswith("e_score_correction_bias") else layout.itemsize
            step = layout.bucket_bytes // (len(columns) * item)
            for first in range(rows.start, rows.stop, step):
                part = Box(first, min(step, rows.stop - first), columns.start, len(columns))
                moved = Box(
                    part.row - there.row + here.row,
                    part.num_rows,
                    part.column - there.column + here.column,
                    len(columns),
                )
                parts.append((one, SliceCopy(one.copy.megatron_name, moved, name, part)))
    return parts


class Whole:
    """Everything of everybody, in tables."""

    def __init__(self, arch, layout):
        self.layout = layout
        self.coordinates = {source.rank: source.coordinates for source in layout.sources}
        self.hosts = {source.rank: source.host for source in layout.sources}
        self.kept = {target.worker: kept_boxes(arch, target) for target in layout.targets}
        found = holdings(arch, layout)
        by_coordinates = {t.coordinates: parts_of(t, self.kept[t.worker], found, layout) for t in layout.targets}
        self.parts = {target.worker: by_coordinates[target.coordinates] for target in layout.targets}
        self.holders = {self.shard_of(one): one.ranks for one in found}
        self.wanted = {target.worker: Counter() for target in layout.targets}
        for worker, parts in self.parts.items():
            for one, copy in parts:
                self.wanted[worker][self.shard_of(one)] += size_of(copy.hf_name, copy.hf_box, layout)
        self.senders = {}
        for shard in self.holders:
            for region in {self.region(target) for target in layout.targets}:
                self.assign_senders(shard, region)

    def shard_of(self, one):
        return one.section[0] % self.layout.sources[0].coordinates.pipeline_size, one.section[1], one.shard

    def region(self, target):
        return target.host if self.layout.sender_policy == "same_host" else ""

    def column(self, worker, has_experts):
        if self.layout.sender_policy != "own_rank_first" or worker not in self.coordinates:
            return 0
        if not any(worker in ranks for shard, ranks in self.holders.items() if shard[1] == has_experts):
            return 0  # its stage has no layer with experts
        shards = {r: expert_shard(p) if has_experts else dense_shard(p) for r, p in self.coordinates.items()}
        return [rank for rank in shards if shards[rank] == shards[worker]].index(worker)

    def line(self, region, has_experts):
        members = [target for target in self.layout.targets if self.region(target) == region]
        return sorted(members, key=lambda target: (self.column(target.worker, has_experts), target.worker))

    def assign_senders(self, shard, region):
        ranks = self.holders[shard]
        able = [rank for rank in ranks if self.layout.sender_policy != "same_host" or self.hosts[rank] == region]
        line = [target.worker for target in self.line(region, shard[1]) if self.wanted[target.worker][shard]]
        if self.layout.sender_policy == "own_rank_first":
            self.senders |= {(worker, shard): {worker: 1} for worker in line if worker in ranks}
            line = [worker for worker in line if worker not in ranks]
        total, start = sum(self.wanted[worker][shard] for worker in line), 0
        for worker in line:
            end, mine = start + self.wanted[worker][shard], {}
            for number, rank in enumerate(able):
                first, last = number * total // len(able), (number + 1) * total // len(able)
                if (overlap := min(last, end) - max(first, start)) > 0:
                    mine[rank] = overlap
            least = min(end - start, total // len(able)) // 64
            self.senders[worker, shard] = {rank: num for rank, num in mine.items() if num >= least}
            start = end

    def stream(self, target):
        line = [one for one in self.line(self.region(target), False) if one.coordinates == target.coordinates]
        stages = self.layout.sources[0].coordinates.layer_split.num_stages
        split = target.coordinates.tensor_parallel
        first = line.index(target) + split.index
        if self.layout.in_step:  # by the number of its engine
            first = target.worker // (split.size * target.coordinates.pipeline_size)
        buckets = []
        for section in [
            ((first + turn) % stages, has_experts) for turn in range(stages) for has_experts in (False, True)
        ]:
            mine = [
                (
                    one.shard,
                    size_of(copy.hf_name, copy.hf_box, self.layout),
                    copy,
                    self.senders[target.worker, self.shard_of(one)],
                )
                for one, copy in self.parts[target.worker]
                if one.section == section
            ]
            buckets += section_buckets(mine, self.layout.bucket_bytes)
        return Stream(target, self.kept[target.worker], tuple(buckets))


def whole_plan(arch, layout):
    """Every worker's stream."""
    whole = Whole(arch, layout)
    return [whole.stream(target) for target in layout.targets]


def section_buckets(parts, bucket_bytes):
    """Buckets of parts ``(shard, bytes, copy, senders)``."""
    sent, done, chosen = Counter(), Counter(), []
    for shard, size, copy, senders in parts:
        done[shard] += size
        behind = {r: Fraction(num, sum(senders.values())) * done[shard] - sent[shard, r] for r, num in senders.items()}
        rank = min(behind, key=lambda one: (-behind[one], one))
        sent[shard, rank] += size
        chosen.append((shard, rank, copy, size))
    filled = [[]]
    for item in chosen:
        if filled[-1] and sum(size for *_, size in filled[-1]) + item[-1] > bucket_bytes:
            filled.append([])
        filled[-1].append(item)
    return [bucket_of(sorted(items, key=lambda item: item[:2])) for items in filled if items]


def bucket_of(items):
    slices, spans, offset = [], {}, 0
    for _, rank, copy, size in items:
        slices.append(Slice(rank, copy, offset))
        first, num = spans.get(rank, (offset, 0))
        spans[rank] = (first, num + size)
        offset += size
    return Bucket(tuple(slices), spans, offset)


def least_sent(arch, layout):
    """Bytes that every rank sends if each part comes from the able replica that has sent least so far."""
    found = holdings(arch, layout)
    hosts = {source.rank: source.host for source in layout.sources}
    sent = dict.fromkeys(hosts, 0)
    for target in layout.targets:
        for one, copy in parts_of(target, kept_boxes(arch, target), found, layout):
            able = [r for r in one.ranks if layout.sender_policy != "same_host" or hosts[r] == target.host]
            if layout.sender_policy == "own_rank_first" and target.worker in able:
                able = [target.worker]
            rank = min(able, key=lambda r: (sent[r], r))
            sent[rank] += size_of(copy.hf_name, copy.hf_box, layout)
    return sent
