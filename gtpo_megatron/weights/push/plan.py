"""The plan of a push: which slice of which trainer rank's shard travels to which sampler worker, and in which bucket.

Pure. A worker receives only what it keeps: its heads, rows and columns of each Hugging Face tensor, each element once
and from one rank. What a worker receives is cut into buckets of bounded size, so that neither side ever holds a whole
model for the push: a rank packs the next bucket while the worker unpacks this one.

Three rules make the plan; ``sections`` and ``replicas`` have the first two:

1. The parts of the model have an order, and buckets are filled in it.
2. Of the replicas of a shard, each serves some of the workers.
3. Workers begin at different stages of the pipeline, one after the other, so that all stages send at the same time;
   all workers of an engine at the same one if they agree on something for every layer (``PushLayout.in_step``).

Every process knows both layouts and applies the rules to what concerns it: a worker to its own stream, a rank to its
own slices. No process ever makes the whole plan.

The words: a **slice** is a box of a tensor that one rank sends to one worker; a **bucket** is the slices that are sent
together; a **span** is the bytes of a bucket that come from one rank; a **stream** is the buckets of one worker.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.weights.adapters import tensor_shapes
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.param_mapping import Box, ExpertParallel, SliceCopy, TensorParallel, expert_of
from gtpo_megatron.weights.push.layout import PushLayout, TargetWorker
from gtpo_megatron.weights.push.replicas import Replicas, Senders, Shard, assign_slices
from gtpo_megatron.weights.push.sections import Section, Sections, SectionSizes
from gtpo_megatron.weights.reshard import ShardCoordinates, stage_mappings

Spans = dict[int, tuple[int, int]]
"""Rank -> its span of a bucket: first byte, and number of bytes."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A box that one rank sends to one worker.

    Attributes:
        rank: number of the sender.
        copy: the box in the rank's parameter and in the Hugging Face tensor.
        offset: place of its first byte in its bucket; elements are dense and row-major.
    """

    rank: int
    copy: SliceCopy
    offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Slices that are sent together. The slices of one rank are contiguous.

    Attributes:
        slices: slices in the order of their offsets; in a rank's stream its own only.
        spans: places of each rank's slices; in a rank's stream its own only, unless it passes the bucket on.
        num_bytes: size of the bucket.
    """

    slices: tuple[Slice, ...]
    spans: Spans
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Stream:
    """Everything that one worker receives in one push.

    Attributes:
        target: the worker.
        kept: Hugging Face name -> the boxes that the worker keeps, in the order of the model.
        buckets: buckets in the order in which they travel.
    """

    target: TargetWorker
    kept: dict[str, list[Box]]
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, slots=True)
class RankStream:
    """The part of one worker's stream that one rank takes part in.

    Attributes:
        worker: number of the worker.
        num_buckets: number of buckets in the worker's whole stream.
        buckets: number in the stream -> bucket, of those that the rank takes part in.
    """

    worker: int
    num_buckets: int
    buckets: dict[int, Bucket]


def relay_partners(rank: int, streams: Sequence[RankStream]) -> set[int]:
    """The ranks that a rank sends to or receives from, if each passes on what the worker of its number wants."""
    senders = {one for stream in streams for bucket in stream.buckets.values() for one in bucket.spans}
    return ({stream.worker for stream in streams} | senders) - {rank}


@dataclass(frozen=True, slots=True)
class _RankSpan:
    """The bytes of one rank in one bucket of a section.

    Attributes:
        bucket: number in the section.
        rank: number of the sender.
        start: place of its first byte in the bucket.
        num_bytes: size of all its slices.
        slices: numbers of its slices among those of its shard.
    """

    bucket: int
    rank: int
    start: int
    num_bytes: int
    slices: list[int] | range


def kept_boxes(arch: Architecture, target: TargetWorker, adapter: AdapterConfig | None = None) -> dict[str, list[Box]]:
    """The boxes of every Hugging Face tensor that a vLLM worker holds: several if it has several projections in it.

    Adapters that travel alone it takes whole: vLLM cuts them itself.

    Raises:
        WeightMappingError: a tensor or the experts do not split over the workers.
    """
    if adapter is not None:
        shapes = tensor_shapes(arch, adapter)
        return {name: [Box(0, rows, 0, columns)] for name, (rows, columns) in shapes.items()}
    whole = ShardCoordinates(tensor_parallel=TensorParallel(1, 0))
    tp, keeps_whole_experts = target.coordinates.tensor_parallel, target.coordinates.expert_parallel
    num_experts = 0 if arch.experts is None else arch.experts.num_experts
    mine = ExpertParallel(tp.size, tp.index).held(num_experts) if keeps_whole_experts else range(num_experts)
    found: dict[str, list[Box]] = {}
    for mapping in stage_mappings(arch, whole, arch.vocab_size):
        expert = expert_of(mapping)
        splits = expert is None or not keeps_whole_experts
        for name, box in mapping.kept(tp if splits else TensorParallel(1, 0)) if splits or expert in mine else ():
            if target.coordinates.keeps(name, arch):
                found.setdefault(name, []).append(box)
    return found


class PushPlan:
    """The plan, of which each process asks for its own part.

    Args:
        arch: architecture of the model.
        layout: both sides of the push.

    Raises:
        WeightMappingError: the layouts cannot be mapped, or no rank has what a worker needs. All methods raise it, too:
            if a shard is on no rank that can reach a worker, or a bucket cannot hold a single row.
    """

    def __init__(self, arch: Architecture, layout: PushLayout) -> None:
        self._arch, self._layout = arch, layout
        self._sections = Sections(arch, layout)
        self._replicas = Replicas(layout, self._sections)

    def stream(self, worker: int) -> Stream:
        """Everything that a worker receives."""
        target = self._layout.target(worker)
        buckets = []
        for section in self._order(target):
            sizes = self._sections.sizes(section, target.coordinates)
            slices: list[list[Slice]] = [[] for _ in sizes.bucket_bytes]
            for number in sorted(sizes.spans):
                copies = self._sections.copies(section, number, target.coordinates)
                for span in self._rank_spans(sizes, _shard(section, number, self._sections), target):
                    slices[span.bucket] += _slices(span, copies, sizes.slice_bytes[number])
            spans = self._section_spans(section, target)
            buckets += [Bucket(tuple(p), s, n) for p, s, n in zip(slices, spans, sizes.bucket_bytes, strict=True)]
        return Stream(target, kept_boxes(self._arch, target, self._layout.adapter), tuple(buckets))

    def spans(self, worker: int) -> list[Spans]:
        """Spans of every bucket of a worker, without the slices."""
        target = self._layout.target(worker)
        return [spans for section in self._order(target) for spans in self._section_spans(section, target)]

    def rank_streams(self, rank: int, *, passes_on: bool = False) -> list[RankStream]:
        """The parts of the workers' streams that a rank takes part in, by worker.

        Args:
            rank: the sender.
            passes_on: the rank receives the whole stream of the worker of its number and hands it on.
        """
        source = next(source for source in self._layout.sources if source.rank == rank)
        found: dict[int, dict[int, Bucket]] = {}
        made: dict[tuple[object, ...], list[tuple[int, Bucket]]] = {}
        for shard in self._replicas.shards_of(source):
            for target, senders in self._replicas.served(shard, source):
                first = 0
                for section in self._order(target):
                    sizes = self._sections.sizes(section, target.coordinates)
                    if _shard(section, shard.number, self._sections) == shard:
                        key = (section, target.coordinates, senders if len(senders) > 1 else None)
                        if key not in made:  # equal for most engines
                            made[key] = list(self._own_buckets(section, shard, target, senders, rank))
                        mine = found.setdefault(target.worker, {})
                        mine |= {first + number: bucket for number, bucket in made[key]}
                    first += len(sizes.bucket_bytes)
        if passes_on and any(target.worker == rank for target in self._layout.targets):
            own = found.get(rank, {})
            found[rank] = {
                number: Bucket(
                    own[number].slices if number in own else (), spans, sum(num for _, num in spans.values())
                )
                for number, spans in enumerate(self.spans(rank))
            }
        return [
            RankStream(worker, self.num_buckets(worker), dict(sorted(buckets.items())))
            for worker, buckets in sorted(found.items())
            if buckets
        ]

    def num_buckets(self, worker: int) -> int:
        """Buckets of a worker's stream."""
        target = self._layout.target(worker)
        return sum(
            len(self._sections.sizes(section, target.coordinates).bucket_bytes) for section in self._order(target)
        )

    def _order(self, target: TargetWorker) -> list[Section]:
        """The sections in the order in which they travel to a worker."""
        stages = self._sections.shape.num_stages
        split = target.coordinates.tensor_parallel
        if self._layout.in_step:
            first = target.worker // (split.size * target.coordinates.pipeline_size)
        else:
            first = self._replicas.turn(target) + split.index
        return [section for turn in range(stages) for section in self._sections.of_stage((first + turn) % stages)]

    def _own_buckets(
        self, section: Section, shard: Shard, target: TargetWorker, senders: Senders, rank: int
    ) -> Iterator[tuple[int, Bucket]]:
        sizes = self._sections.sizes(section, target.coordinates)
        copies = self._sections.copies(section, shard.number, target.coordinates)
        for span in _rank_spans(sizes, shard.number, senders):
            if span.rank == rank:
                slices = tuple(_slices(span, copies, sizes.slice_bytes[shard.number]))
                spans = {rank: (span.start, span.num_bytes)}
                yield span.bucket, Bucket(slices, spans, sizes.bucket_bytes[span.bucket])

    def _section_spans(self, section: Section, target: TargetWorker) -> list[Spans]:
        sizes = self._sections.sizes(section, target.coordinates)
        found: list[Spans] = [{} for _ in sizes.bucket_bytes]
        for number in sorted(sizes.spans):
            for span in self._rank_spans(sizes, _shard(section, number, self._sections), target):
                found[span.bucket][span.rank] = (span.start, span.num_bytes)
        return found

    def _rank_spans(self, sizes: SectionSizes, shard: Shard, target: TargetWorker) -> Iterator[_RankSpan]:
        """Yields the span of each of a shard's replicas in each bucket of a worker."""
        return _rank_spans(sizes, shard.number, self._replicas.senders(shard, target))


def _shard(section: Section, number: int, sections: Sections) -> Shard:
    """A shard of a section."""
    return Shard(section.stage % sections.shape.pipeline, section.has_experts, number)


def _rank_spans(sizes: SectionSizes, number: int, senders: Senders) -> Iterator[_RankSpan]:
    slice_bytes = sizes.slice_bytes.get(number, [])
    ranks = assign_slices(slice_bytes, senders) if len(senders) > 1 else []
    first = 0
    for span in sizes.spans.get(number, ()):
        slices = range(first, first + span.num_slices)
        first += span.num_slices
        if len(senders) == 1:
            yield _RankSpan(span.bucket, senders[0][0], span.start, span.num_bytes, slices)
            continue
        start = span.start
        for rank in sorted({ranks[one] for one in slices}):
            mine = [one for one in slices if ranks[one] == rank]
            num_bytes = sum(slice_bytes[one] for one in mine)
            yield _RankSpan(span.bucket, rank, start, num_bytes, mine)
            start += num_bytes


def _slices(span: _RankSpan, copies: list[SliceCopy], slice_bytes: list[int]) -> Iterator[Slice]:
    offset = span.start
    for number in span.slices:
        yield Slice(span.rank, copies[number], offset)
        offset += slice_bytes[number]
