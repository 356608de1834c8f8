"""The plan of a push: which slice of which trainer rank's shard travels to which sampler worker, and in which bucket.

Pure. A worker receives only what it keeps: its heads, rows and columns of each Hugging Face tensor, each element once
and from one rank. Of the replicas that all hold an element, the one that has least to send sends it; experts and
everything else are split over a stage's ranks independently, so they have different replicas. What a worker receives is
cut into buckets of bounded size, in the order of the model, so that neither side ever holds a whole model for the push:
a rank packs the next bucket while the worker unpacks this one.

All processes compute the same plan from the same ``PushLayout``; only that travels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from gtpo_megatron.errors import WeightMappingError
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.param_mapping import Box, ExpertParallel, SliceCopy, TensorParallel, expert_of
from gtpo_megatron.weights.reshard import ShardPlace, export_plan, hf_shapes, stage_mappings, stays_float32

ALIGNMENT_BYTES = 64
"""Start of every piece in a bucket, one cache line."""

FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRank:
    """A trainer rank that can send.

    Attributes:
        rank: in the trainer's world.
        place: which shards it holds.
        host: the machine it is on.
    """

    rank: int
    place: ShardPlace
    host: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetWorker:
    """A sampler worker that receives.

    Attributes:
        worker: its number over all engines.
        tensor_parallel: its place in its engine.
        expert_parallel: it keeps whole experts, as many as each other worker of its engine, in place of its rows and
            columns of every expert.
        host: the machine it is on.
    """

    worker: int
    tensor_parallel: TensorParallel
    expert_parallel: bool = False
    host: str = ""

    def __str__(self) -> str:
        return f"worker {self.worker} (tp{self.tensor_parallel.index} of {self.tensor_parallel.size})"


@dataclass(frozen=True, kw_only=True, slots=True)
class PushLayout:
    """Both sides of a push.

    Attributes:
        sources: every trainer rank.
        targets: every sampler worker.
        padded_vocab_size: of the trainer.
        itemsize: bytes per element on the way, but of tensors that stay float32.
        bucket_bytes: largest bucket.
        reach: who can serve a worker. ``same_host``: ranks on its own machine; ``anywhere``: all; ``own_rank_first``:
            all, but the rank of the worker's number, on whose GPU it is, wherever that holds what is wanted.
    """

    sources: tuple[SourceRank, ...]
    targets: tuple[TargetWorker, ...]
    padded_vocab_size: int
    itemsize: int
    bucket_bytes: int
    reach: Literal["same_host", "anywhere", "own_rank_first"] = "same_host"

    def num_bytes(self, copy: SliceCopy) -> int:
        """Bytes of a slice on the wire."""
        item_bytes = FLOAT32_BYTES if stays_float32(copy.hf_name) else self.itemsize
        return copy.hf_box.num_elements * item_bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """A box that one rank sends to one worker.

    Attributes:
        rank: of the sender.
        copy: the box in the rank's parameter and in the Hugging Face tensor.
        offset: of its first byte in its bucket; elements are dense and row-major.
    """

    rank: int
    copy: SliceCopy
    offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Pieces that are sent together. The pieces of one rank are contiguous.

    Attributes:
        pieces: in order of their offsets.
        spans: rank -> first byte and number of bytes of its pieces.
        num_bytes: of all.
    """

    pieces: tuple[Piece, ...]
    spans: dict[int, tuple[int, int]]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Stream:
    """Everything that one worker receives in one push.

    Attributes:
        target: the worker.
        kept: Hugging Face name -> the box that the worker keeps, in the order of the model.
        buckets: in the order they travel.
    """

    target: TargetWorker
    kept: dict[str, Box]
    buckets: tuple[Bucket, ...]


def kept_boxes(arch: Architecture, target: TargetWorker) -> dict[str, Box]:
    """The box of every Hugging Face tensor that a vLLM worker holds.

    Raises:
        WeightMappingError: a tensor or the experts do not split over the workers.
    """
    whole, tp = ShardPlace(tensor_parallel=TensorParallel(1, 0)), target.tensor_parallel
    num_experts = 0 if arch.experts is None else arch.experts.num_experts
    mine = ExpertParallel(tp.size, tp.index).held(num_experts) if target.expert_parallel else range(num_experts)
    found: dict[str, Box] = {}
    for mapping in stage_mappings(arch, whole, arch.vocab_size):
        expert = expert_of(mapping)
        if expert is None or not target.expert_parallel:
            found |= mapping.kept(tp)
        elif expert in mine:
            found |= mapping.kept(TensorParallel(1, 0))
    return found


Holding = tuple[Sequence[SourceRank], SliceCopy]
"""A slice of a Hugging Face tensor, and the ranks that all hold it."""


def plan_push(arch: Architecture, layout: PushLayout) -> list[Stream]:
    """One stream per worker.

    Raises:
        WeightMappingError: the layouts cannot be mapped, a shard is on no rank that can reach a worker, or a bucket
            cannot hold a single row.
    """
    return list(plan_streams(arch, layout))


def plan_streams(arch: Architecture, layout: PushLayout) -> Iterator[Stream]:
    """Yields the streams of ``plan_push`` one by one: those of a large mixture of experts have millions of pieces."""
    holdings = _holdings(arch, layout)
    sent = dict.fromkeys((source.rank for source in layout.sources), 0)
    wanted: dict[tuple[TensorParallel, bool], tuple[dict[str, Box], list[Holding]]] = {}
    for target in layout.targets:
        place = (target.tensor_parallel, target.expert_parallel)
        if place not in wanted:  # workers of other engines want the same
            kept = kept_boxes(arch, target)
            wanted[place] = kept, [part for name in kept for part in _parts(name, kept[name], holdings[name], layout)]
        yield _plan_stream(layout, target, *wanted[place], sent)


def share_of(rank: int, stream: Stream) -> Stream:
    """A stream with the pieces of one rank only; buckets keep their spans."""
    buckets = (
        Bucket(tuple(piece for piece in bucket.pieces if piece.rank == rank), bucket.spans, bucket.num_bytes)
        for bucket in stream.buckets
    )
    return Stream(stream.target, stream.kept, tuple(buckets))


def _holdings(arch: Architecture, layout: PushLayout) -> dict[str, list[Holding]]:
    """Who holds which slices of every Hugging Face tensor."""
    found: dict[str, list[Holding]] = {name: [] for name in hf_shapes(arch)}
    for is_dense in (True, False) if arch.experts is not None else (True,):
        holders: dict[ShardPlace, list[SourceRank]] = {}
        for source in layout.sources:
            shard = source.place.dense_shard if is_dense else source.place.expert_shard
            holders.setdefault(shard, []).append(source)
        for shard, ranks in holders.items():
            for copy in export_plan(arch, shard, layout.padded_vocab_size, dense=is_dense, experts=not is_dense):
                found[copy.hf_name].append((ranks, copy))
    return found


def _parts(name: str, wanted: Box, holdings: Sequence[Holding], layout: PushLayout) -> list[Holding]:
    """The pieces that a box of a tensor is made of."""
    parts = [
        (ranks, part)
        for ranks, copy in holdings
        if (shared := _intersection(copy, wanted)) is not None
        for part in _rows_at_once(shared, layout)
    ]
    _check_cover(name, wanted, [part.hf_box for _, part in parts])
    return parts


def _plan_stream(
    layout: PushLayout, target: TargetWorker, kept: dict[str, Box], parts: Sequence[Holding], sent: dict[int, int]
) -> Stream:
    able: dict[int, list[int]] = {}
    pieces: list[tuple[int, SliceCopy]] = []
    for ranks, part in parts:
        if id(ranks) not in able:
            able[id(ranks)] = _able(ranks, layout, target, part.hf_name)
        choice = able[id(ranks)]
        rank = choice[0] if len(choice) == 1 else min(choice, key=lambda one: (sent[one], one))
        sent[rank] += layout.num_bytes(part)
        pieces.append((rank, part))
    return Stream(target, kept, tuple(_buckets(pieces, layout)))


def _intersection(copy: SliceCopy, wanted: Box) -> SliceCopy | None:
    """The part of a copy that lies in a box of its Hugging Face tensor."""
    mine, theirs = copy.megatron_box, copy.hf_box
    if (shared := theirs.overlap(wanted)) is None:
        return None
    here = shared.moved(mine.row - theirs.row, mine.column - theirs.column)
    return SliceCopy(copy.megatron_name, here, copy.hf_name, shared)


def _rows_at_once(copy: SliceCopy, layout: PushLayout) -> Iterator[SliceCopy]:
    """Cuts a copy by rows into parts that fit into a bucket."""
    here, there = copy.megatron_box, copy.hf_box
    row_bytes = layout.num_bytes(copy) // there.num_rows
    if row_bytes > layout.bucket_bytes:
        raise WeightMappingError(
            f"{copy.hf_name}: a row of {row_bytes} bytes exceeds the bucket of {layout.bucket_bytes}; enlarge "
            f"weight_sync.bucket_mib"
        )
    step = layout.bucket_bytes // row_bytes
    for start in range(0, there.num_rows, step):
        rows = min(step, there.num_rows - start)
        yield SliceCopy(
            copy.megatron_name,
            Box(here.row + start, rows, here.column, here.num_columns),
            copy.hf_name,
            Box(there.row + start, rows, there.column, there.num_columns),
        )


def _able(holders: Sequence[SourceRank], layout: PushLayout, target: TargetWorker, name: str) -> list[int]:
    """The ranks that can serve a worker."""
    able = [source.rank for source in holders if layout.reach != "same_host" or source.host == target.host]
    if layout.reach == "own_rank_first" and target.worker in able:
        return [target.worker]
    if not able:
        raise WeightMappingError(
            f"{name}: {target} on host {target.host!r} can take weights from ranks on its own machine only, and "
            f"none of them holds this shard (it is on {', '.join(f'rank {s.rank} ({s.host!r})' for s in holders)}); "
            f"use weight_sync.transport='process_group', or place the engine beside a whole replica"
        )
    return able


def _check_cover(name: str, wanted: Box, parts: Sequence[Box]) -> None:
    """Boxes of one tensor never overlap, so equal areas mean that every element is there."""
    area = sum(box.num_elements for box in parts)
    if area != wanted.num_elements:
        raise WeightMappingError(
            f"{name}: the trainer's ranks hold {area} of the {wanted.num_elements} elements that a worker needs; "
            f"do the sources cover every pipeline stage, tensor rank and expert rank?"
        )


def _buckets(pieces: Sequence[tuple[int, SliceCopy]], layout: PushLayout) -> Iterator[Bucket]:
    gathered: list[tuple[int, SliceCopy]] = []
    used = 0
    for rank, copy in pieces:
        size = _aligned(copy, layout)
        if gathered and used + size > layout.bucket_bytes:
            yield _bucket(gathered, layout)
            gathered, used = [], 0
        gathered.append((rank, copy))
        used += size
    if gathered:
        yield _bucket(gathered, layout)


def _bucket(gathered: Sequence[tuple[int, SliceCopy]], layout: PushLayout) -> Bucket:
    pieces: list[Piece] = []
    spans: dict[int, tuple[int, int]] = {}
    offset = 0
    for rank, copy in sorted(gathered, key=lambda piece: piece[0]):
        pieces.append(Piece(rank, copy, offset))
        first, size = spans.get(rank, (offset, 0))
        spans[rank] = (first, size + _aligned(copy, layout))
        offset = first + spans[rank][1]
    return Bucket(tuple(pieces), spans, offset)


def _aligned(copy: SliceCopy, layout: PushLayout) -> int:
    return -(-layout.num_bytes(copy) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
