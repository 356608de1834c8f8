"""The plan of a push: which slice of which trainer rank's shard travels to which sampler worker, and in which bucket.

Pure. A worker receives only what it keeps: its heads, rows and columns of each Hugging Face tensor, each element once
and from one rank. What a worker receives is cut into buckets of bounded size, so that neither side ever holds a whole
model for the push: a rank packs the next bucket while the worker unpacks this one.

Three rules make the plan; ``sections`` and ``sharing`` have the first two:

1. The parts of the model have an order, and buckets are filled in it.
2. Of the replicas of a shard, each serves some of the workers.
3. Workers begin at different stages of the pipeline, one after the other, so that all stages send at the same time.

Every process knows both layouts and applies the rules to what concerns it: a worker to its own stream, a rank to its
own pieces. No process ever makes the whole plan.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.param_mapping import Box, ExpertParallel, SliceCopy, TensorParallel, expert_of
from gtpo_megatron.weights.push.layout import PushLayout, TargetWorker
from gtpo_megatron.weights.push.sections import Section, Sections, Sheet
from gtpo_megatron.weights.push.sharing import Shard, Shares, Sharing, deal
from gtpo_megatron.weights.reshard import ShardPlace, stage_mappings

Spans = dict[int, tuple[int, int]]
"""Rank -> first byte of its part of a bucket, and number of bytes."""


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
        pieces: in order of their offsets; in a rank's share its own only.
        spans: where the pieces of each rank are; in a rank's share its own only, unless it passes the bucket on.
        num_bytes: of the bucket.
    """

    pieces: tuple[Piece, ...]
    spans: Spans
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


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one worker's stream that one rank takes part in.

    Attributes:
        worker: its number.
        num_buckets: of the worker's whole stream.
        buckets: number in the stream -> bucket, of those that the rank takes part in.
    """

    worker: int
    num_buckets: int
    buckets: dict[int, Bucket]


def relay_partners(rank: int, shares: Sequence[Share]) -> set[int]:
    """The ranks that a rank sends to or receives from, if each passes on what the worker of its number wants."""
    senders = {one for share in shares for bucket in share.buckets.values() for one in bucket.spans}
    return ({share.worker for share in shares} | senders) - {rank}


@dataclass(frozen=True, slots=True)
class _Parcel:
    """Contribution of one rank to one bucket of a section.

    Attributes:
        bucket: its number in the section.
        rank: of the sender.
        start: of its first byte in the bucket.
        num_bytes: of all its parts.
        items: numbers of its parts among those of its shard.
    """

    bucket: int
    rank: int
    start: int
    num_bytes: int
    items: list[int] | range


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


class PushPlan:
    """The plan, of which each process asks for its own part.

    Args:
        arch: of the model.
        layout: both sides of the push.

    Raises:
        WeightMappingError: the layouts cannot be mapped, or no rank has what a worker needs. All methods raise it, too:
            if a shard is on no rank that can reach a worker, or a bucket cannot hold a single row.
    """

    def __init__(self, arch: Architecture, layout: PushLayout) -> None:
        self._arch, self._layout = arch, layout
        self._sections = Sections(arch, layout)
        self._sharing = Sharing(layout, self._sections)

    def stream(self, worker: int) -> Stream:
        """Everything that a worker receives."""
        target = self._layout.target(worker)
        buckets = []
        for section in self._order(target):
            sheet = self._sections.sheet(section, target.place)
            pieces: list[list[Piece]] = [[] for _ in sheet.bucket_bytes]
            for number in sorted(sheet.runs):
                copies = self._sections.copies(section, number, target.place)
                for parcel in self._parcels(sheet, _shard(section, number, self._sections), target):
                    pieces[parcel.bucket] += _pieces(parcel, copies, sheet.item_bytes[number])
            spans = self._section_spans(section, target)
            buckets += [Bucket(tuple(p), s, n) for p, s, n in zip(pieces, spans, sheet.bucket_bytes, strict=True)]
        return Stream(target, kept_boxes(self._arch, target), tuple(buckets))

    def spans(self, worker: int) -> list[Spans]:
        """Ranks and sizes of every bucket of a worker, without the pieces."""
        target = self._layout.target(worker)
        return [spans for section in self._order(target) for spans in self._section_spans(section, target)]

    def shares(self, rank: int, *, passes_on: bool = False) -> list[Share]:
        """Everything that a rank does, by worker.

        Args:
            rank: the sender.
            passes_on: the rank receives the whole stream of the worker of its number and hands it on.
        """
        source = next(source for source in self._layout.sources if source.rank == rank)
        found: dict[int, dict[int, Bucket]] = {}
        made: dict[tuple[object, ...], list[tuple[int, Bucket]]] = {}
        for shard in self._sharing.shards_of(source):
            for target, shares in self._sharing.served(shard, source):
                first = 0
                for section in self._order(target):
                    sheet = self._sections.sheet(section, target.place)
                    if _shard(section, shard.number, self._sections) == shard:
                        key = (section, target.place, shares if len(shares) > 1 else None)
                        if key not in made:  # equal for most engines
                            made[key] = list(self._own_buckets(section, shard, target, shares, rank))
                        mine = found.setdefault(target.worker, {})
                        mine |= {first + number: bucket for number, bucket in made[key]}
                    first += len(sheet.bucket_bytes)
        if passes_on and any(target.worker == rank for target in self._layout.targets):
            own = found.get(rank, {})
            found[rank] = {
                number: Bucket(
                    own[number].pieces if number in own else (), spans, sum(num for _, num in spans.values())
                )
                for number, spans in enumerate(self.spans(rank))
            }
        return [
            Share(worker, self.num_buckets(worker), dict(sorted(buckets.items())))
            for worker, buckets in sorted(found.items())
            if buckets
        ]

    def num_buckets(self, worker: int) -> int:
        """Buckets of a worker's stream."""
        target = self._layout.target(worker)
        return sum(len(self._sections.sheet(section, target.place).bucket_bytes) for section in self._order(target))

    def _order(self, target: TargetWorker) -> list[Section]:
        """The sections in the order in which they travel to a worker."""
        stages = self._sections.shape.num_stages
        first = self._sharing.seat(target) + target.tensor_parallel.index
        return [section for turn in range(stages) for section in self._sections.of_stage((first + turn) % stages)]

    def _own_buckets(
        self, section: Section, shard: Shard, target: TargetWorker, shares: Shares, rank: int
    ) -> Iterator[tuple[int, Bucket]]:
        sheet = self._sections.sheet(section, target.place)
        copies = self._sections.copies(section, shard.number, target.place)
        for parcel in _parcels(sheet, shard.number, shares):
            if parcel.rank == rank:
                pieces = tuple(_pieces(parcel, copies, sheet.item_bytes[shard.number]))
                span = {rank: (parcel.start, parcel.num_bytes)}
                yield parcel.bucket, Bucket(pieces, span, sheet.bucket_bytes[parcel.bucket])

    def _section_spans(self, section: Section, target: TargetWorker) -> list[Spans]:
        sheet = self._sections.sheet(section, target.place)
        found: list[Spans] = [{} for _ in sheet.bucket_bytes]
        for number in sorted(sheet.runs):
            for parcel in self._parcels(sheet, _shard(section, number, self._sections), target):
                found[parcel.bucket][parcel.rank] = (parcel.start, parcel.num_bytes)
        return found

    def _parcels(self, sheet: Sheet, shard: Shard, target: TargetWorker) -> Iterator[_Parcel]:
        """Yields the contribution of each of a shard's replicas to each bucket of a worker."""
        return _parcels(sheet, shard.number, self._sharing.shares(shard, target))


def _shard(section: Section, number: int, sections: Sections) -> Shard:
    """A shard of a section."""
    return Shard(section.stage % sections.shape.pipeline, section.has_experts, number)


def _parcels(sheet: Sheet, number: int, shares: Shares) -> Iterator[_Parcel]:
    sizes = sheet.item_bytes.get(number, [])
    ranks = deal(sizes, shares) if len(shares) > 1 else []
    item = 0
    for run in sheet.runs.get(number, ()):
        items = range(item, item + run.num_items)
        item += run.num_items
        if len(shares) == 1:
            yield _Parcel(run.bucket, shares[0][0], run.start, run.num_bytes, items)
            continue
        start = run.start
        for rank in sorted({ranks[one] for one in items}):
            mine = [one for one in items if ranks[one] == rank]
            num_bytes = sum(sizes[one] for one in mine)
            yield _Parcel(run.bucket, rank, start, num_bytes, mine)
            start += num_bytes


def _pieces(parcel: _Parcel, copies: list[SliceCopy], sizes: list[int]) -> Iterator[Piece]:
    offset = parcel.start
    for item in parcel.items:
        yield Piece(parcel.rank, copies[item], offset)
        offset += sizes[item]
