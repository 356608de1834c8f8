"""The plan of a push: which slice of which trainer rank's shard travels to which sampler worker, and in which bucket.

Pure. A worker receives only what it keeps: its heads, rows and columns of each Hugging Face tensor, each element once
and from one rank. Of the replicas that all hold an element, the one that has least to send sends it. What a worker
receives is cut into buckets of bounded size, in the order of the model, so that neither side ever holds a whole model
for the push: a rank packs the next bucket while the worker unpacks this one.

All processes compute the same plan from the same ``PushLayout``; only that travels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from gtpo_megatron.errors import WeightMappingError
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.param_mapping import Box, SliceCopy, TensorParallel
from gtpo_megatron.weights.reshard import ShardPlace, export_plan, hf_shapes, stage_mappings

ALIGNMENT_BYTES = 64
"""Start of every piece in a bucket, one cache line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRank:
    """A trainer rank that can send.

    Attributes:
        rank: in the trainer's world.
        place: which shard it holds; replicas (data or context parallel) have equal places.
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
        host: the machine it is on.
    """

    worker: int
    tensor_parallel: TensorParallel
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
        itemsize: bytes per element on the way.
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


@dataclass(frozen=True, slots=True)
class Piece:
    """A box that travels from a rank to a worker.

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
    """What travels together. The pieces of one rank lie next to each other.

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


def kept_boxes(arch: Architecture, tp: TensorParallel) -> dict[str, Box]:
    """The box of every Hugging Face tensor that a vLLM worker holds.

    Raises:
        WeightMappingError: a tensor does not split over the workers.
    """
    whole = ShardPlace(tensor_parallel=TensorParallel(1, 0))
    return {name: box for mapping in stage_mappings(arch, whole, arch.vocab_size) for name, box in mapping.kept(tp)}


def plan_push(arch: Architecture, layout: PushLayout) -> list[Stream]:
    """One stream per worker.

    Raises:
        WeightMappingError: the layouts cannot be mapped, a shard is on no rank that can reach a worker, or a bucket
            cannot hold a single row.
    """
    holders: dict[ShardPlace, list[SourceRank]] = {}
    for source in layout.sources:
        holders.setdefault(source.place, []).append(source)
    copies: dict[str, list[tuple[ShardPlace, SliceCopy]]] = {name: [] for name in hf_shapes(arch)}
    for place in holders:
        for copy in export_plan(arch, place, layout.padded_vocab_size):
            copies[copy.hf_name].append((place, copy))
    sent = dict.fromkeys((source.rank for source in layout.sources), 0)
    return [_plan_stream(arch, layout, target, copies, holders, sent) for target in layout.targets]


def _plan_stream(
    arch: Architecture,
    layout: PushLayout,
    target: TargetWorker,
    copies: dict[str, list[tuple[ShardPlace, SliceCopy]]],
    holders: dict[ShardPlace, list[SourceRank]],
    sent: dict[int, int],
) -> Stream:
    kept = kept_boxes(arch, target.tensor_parallel)
    pieces: list[tuple[int, SliceCopy]] = []
    for name, wanted in kept.items():
        parts = [
            (place, part)
            for place, copy in copies[name]
            if (shared := _intersection(copy, wanted)) is not None
            for part in _rows_at_once(shared, layout)
        ]
        _check_cover(name, wanted, [part.hf_box for _, part in parts])
        for place, part in parts:
            rank = _least_loaded(holders[place], layout, target, name, sent)
            sent[rank] += part.hf_box.num_elements * layout.itemsize
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
    """The copy, cut by rows so that each part fits into a bucket."""
    here, there = copy.megatron_box, copy.hf_box
    row_bytes = there.num_columns * layout.itemsize
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


def _least_loaded(
    holders: Sequence[SourceRank], layout: PushLayout, target: TargetWorker, name: str, sent: dict[int, int]
) -> int:
    able = [source.rank for source in holders if layout.reach != "same_host" or source.host == target.host]
    if layout.reach == "own_rank_first" and target.worker in able:
        return target.worker
    if not able:
        raise WeightMappingError(
            f"{name}: {target} on host {target.host!r} can take weights from ranks on its own machine only, and "
            f"none of them holds this shard (it is on {', '.join(f'rank {s.rank} ({s.host!r})' for s in holders)}); "
            f"use weight_sync.transport='process_group', or place the engine beside a whole replica"
        )
    return min(able, key=lambda rank: (sent[rank], rank))


def _check_cover(name: str, wanted: Box, parts: Sequence[Box]) -> None:
    """Boxes of one tensor never overlap, so equal areas mean that every element is there."""
    area = sum(box.num_elements for box in parts)
    if area != wanted.num_elements:
        raise WeightMappingError(
            f"{name}: the trainer's ranks hold {area} of the {wanted.num_elements} elements that a worker needs; "
            f"do the sources cover every pipeline stage and tensor rank?"
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
    for rank in sorted({rank for rank, _ in gathered}):
        first = offset
        for sender, copy in gathered:
            if sender == rank:
                pieces.append(Piece(rank, copy, offset))
                offset += _aligned(copy, layout)
        spans[rank] = (first, offset - first)
    return Bucket(tuple(pieces), spans, offset)


def _aligned(copy: SliceCopy, layout: PushLayout) -> int:
    num_bytes = copy.hf_box.num_elements * layout.itemsize
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
