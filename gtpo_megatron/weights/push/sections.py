"""The order in which a worker's part of the model travels, and how large each part of it is.

The model is cut into sections: the parameters of a virtual pipeline stage that are no experts', and those that are.
Only ranks of one pipeline stage hold parts of a section, each part is in one shard, and no bucket has parts of two
sections. So a rank needs to know of a section what its shard contributes to each bucket and what comes before that in
the bucket: sizes, which are the same for every layer and every expert of a kind. They are computed once and counted.
Names and boxes are made only for what a process sends or receives.

Inside the experts' section of a stage, experts of different expert-parallel ranks take turns, so that all of them send
at the same time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import get_args

from gtpo_megatron.errors import WeightMappingError
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.param_mapping import (
    Box,
    ExpertParallel,
    ParamMapping,
    Replicated,
    SliceCopy,
    TensorParallel,
    expert_of,
)
from gtpo_megatron.weights.push.layout import PushLayout, TrainerShape, WorkerPlace, trainer_shape
from gtpo_megatron.weights.reshard import chunk_mappings, chunk_prefix, is_tied_copy, stays_float32

ALIGNMENT_BYTES = 64
"""Start of every piece in a bucket, one cache line."""

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Section:
    """Parameters of one kind of one virtual stage.

    Attributes:
        stage: of the whole pipeline.
        has_experts: experts' parameters; else all others.
    """

    stage: int
    has_experts: bool


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a parameter that one shard has and the workers of one place keep.

    Attributes:
        shard: number of the shard among those that the parameter is split into.
        name: number of the tensor among the parameter's Hugging Face tensors.
        here: the box in the shard.
        there: the box in the Hugging Face tensor.
        num_bytes: in a bucket, up to the next piece.
    """

    shard: int
    name: int
    here: Box
    there: Box
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """Contribution of one shard to one bucket of a section.

    Attributes:
        bucket: its number in the section.
        start: of the first byte in the bucket.
        num_items: parts, which follow each other.
        num_bytes: of all of them.
    """

    bucket: int
    start: int
    num_items: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Sheet:
    """Sizes of a section for the workers of one place.

    Attributes:
        bucket_bytes: size of every bucket.
        runs: shard -> what it contributes, in the order of the buckets; shards without a part are absent.
        item_bytes: shard -> sizes of its parts, in order.
    """

    bucket_bytes: tuple[int, ...]
    runs: dict[int, list[Run]]
    item_bytes: dict[int, list[int]]

    def shard_bytes(self, shard: int) -> int:
        """Bytes of all parts of a shard."""
        return sum(run.num_bytes for run in self.runs.get(shard, ()))


class Sections:
    """The sections of a model for a trainer's layout; results are kept, since workers and layers repeat.

    Args:
        arch: of the model.
        layout: of the push.

    Raises:
        WeightMappingError: the model does not split over the layout, or its ranks have different ones.
    """

    def __init__(self, arch: Architecture, layout: PushLayout) -> None:
        self._arch, self._layout = arch, layout
        self.shape: TrainerShape = trainer_shape(layout)
        if (problem := self.shape.layer_split.problem(arch.num_layers)) is not None:
            raise WeightMappingError(problem)
        self._sheets: dict[tuple[object, ...], Sheet] = {}
        self._cuts: dict[tuple[object, ...], tuple[Cut, ...]] = {}
        self._mappings: dict[tuple[Section, int], list[ParamMapping]] = {}

    @property
    def _num_experts(self) -> int:
        return 0 if self._arch.experts is None else self._arch.experts.num_experts

    def of_stage(self, stage: int) -> list[Section]:
        """A virtual stage's sections, in the order they travel."""
        kinds = (False, True) if any(self._expert_layers(stage)) else (False,)
        return [Section(stage, has_experts) for has_experts in kinds]

    def of_pipeline_stage(self, stage: int) -> list[Section]:
        """The sections that the ranks of a pipeline stage hold."""
        stages = range(stage, self.shape.num_stages, self.shape.pipeline)
        return [section for virtual in stages for section in self.of_stage(virtual)]

    def sheet(self, section: Section, place: WorkerPlace) -> Sheet:
        """Sizes of every shard's contribution to every bucket."""
        flags = self._expert_layers(section.stage)
        kind: tuple[object, ...] = (sum(flags),)
        if not section.has_experts:
            num_layers = len(self._layers(section.stage))
            kind = (num_layers, *flags, section.stage == 0, section.stage == self.shape.num_stages - 1)
        key = (section.has_experts, kind, place)
        if key not in self._sheets:
            items = self._expert_items(section, place) if section.has_experts else self._dense_items(section, place)
            self._sheets[key] = _sheet(items, self._layout.bucket_bytes)
        return self._sheets[key]

    def copies(self, section: Section, shard: int, place: WorkerPlace) -> list[SliceCopy]:
        """The parts of a shard, in order."""
        group, shard = divmod(shard, self.shape.expert_tensor) if section.has_experts else (0, shard)
        found: list[SliceCopy] = []
        for mapping in self.mappings(section, group):
            if not self._keeps(place, expert_of(mapping)):
                continue
            names = hf_names(mapping)
            found += [
                SliceCopy(mapping.megatron_name, cut.here, names[cut.name], cut.there)
                for cut in self.cuts(mapping, place)
                if cut.shard == shard
            ]
        return found

    def mappings(self, section: Section, group: int = 0) -> list[ParamMapping]:
        """The parameters of a section, of one expert-parallel rank's experts if it has any."""
        if (section, group) not in self._mappings:
            chunk, size = section.stage // self.shape.pipeline, self.shape.expert
            experts = ExpertParallel(size, group).held(self._num_experts) if section.has_experts else range(0)
            self._mappings[section, group] = [
                mapping
                for mapping in chunk_mappings(
                    self._arch,
                    split=self.shape.layer_split,
                    stage=section.stage,
                    prefix=chunk_prefix(chunk, self.shape.virtual),
                    padded_vocab_size=self._layout.padded_vocab_size,
                    experts=experts,
                )
                if (expert_of(mapping) is not None) == section.has_experts and not is_tied_copy(self._arch, mapping)
            ]
        return self._mappings[section, group]

    def cuts(self, mapping: ParamMapping, place: WorkerPlace) -> tuple[Cut, ...]:
        """The parts of a parameter that workers of a place keep: by tensor, and then by shard.

        Raises:
            WeightMappingError: it does not split over shards or workers, or a bucket cannot hold a single row.
        """
        is_expert = expert_of(mapping) is not None
        item_bytes = tuple(
            FLOAT32_BYTES if stays_float32(name) else self._layout.itemsize for name in hf_names(mapping)
        )
        key = (type(mapping), is_expert, place, item_bytes, *(getattr(mapping, size) for size in _SIZES[type(mapping)]))
        if key not in self._cuts:
            num_shards = self.shape.expert_tensor if is_expert else self.shape.tensor
            split = TensorParallel(1, 0) if is_expert and place.expert_parallel else place.tensor_parallel
            self._cuts[key] = tuple(_cuts(mapping, num_shards, split, item_bytes, self._layout.bucket_bytes))
        return self._cuts[key]

    def _expert_layers(self, stage: int) -> tuple[bool, ...]:
        """Per layer of a virtual stage whether it has experts."""
        if self._arch.experts is None:
            return ()
        layers = self._layers(stage)
        return self._arch.experts.layers[layers.start : layers.stop]

    def _layers(self, stage: int) -> range:
        return self.shape.layer_split.layers(self._arch.num_layers, stage)

    def _keeps(self, place: WorkerPlace, expert: int | None) -> bool:
        if expert is None or not place.expert_parallel:
            return True
        split = place.tensor_parallel
        return expert in ExpertParallel(split.size, split.index).held(self._num_experts)

    def _dense_items(self, section: Section, place: WorkerPlace) -> Iterator[tuple[int, int]]:
        for mapping in self.mappings(section):
            for cut in self.cuts(mapping, place):
                yield cut.shard, cut.num_bytes

    def _expert_items(self, section: Section, place: WorkerPlace) -> Iterator[tuple[int, int]]:
        held = ExpertParallel(self.shape.expert, 0).held(self._num_experts)
        first = [mapping for mapping in self.mappings(section) if expert_of(mapping) == held[0]]
        layers = sum(self._expert_layers(section.stage))
        one = [cut for mapping in first[: len(first) // layers] for cut in self.cuts(mapping, place)]
        layer: list[tuple[int, int]] = []
        for local in held:
            for group in range(self.shape.expert):
                if self._keeps(place, group * len(held) + local):
                    layer += [(group * self.shape.expert_tensor + cut.shard, cut.num_bytes) for cut in one]
        for _ in range(layers):
            yield from layer


_SIZES = {
    kind: [field.name for field in fields(kind) if not field.name.endswith("_name") and field.name != "expert"]
    for kind in get_args(ParamMapping)
}
"""What the boxes of a parameter depend on, by its kind: everything but its names and its expert's number."""


_NAMES = {
    kind: [field.name for field in fields(kind) if field.name.endswith("_name") and field.name != "megatron_name"]
    for kind in get_args(ParamMapping)
}
"""Fields with a parameter's Hugging Face names, by its kind."""


def hf_names(mapping: ParamMapping) -> list[str]:
    """The Hugging Face tensors of a parameter, in the order of the model."""
    return [getattr(mapping, field) for field in _NAMES[type(mapping)]]


def _cuts(
    mapping: ParamMapping, num_shards: int, split: TensorParallel, item_bytes: tuple[int, ...], bucket_bytes: int
) -> Iterator[Cut]:
    kept = dict(mapping.kept(split))
    # any shard has a replicated tensor: that one gives it which the worker takes other rows or columns from
    shards = [split.index * num_shards // split.size] if isinstance(mapping, Replicated) else range(num_shards)
    copies = [(shard, copy) for shard in shards for copy in mapping.copies(TensorParallel(num_shards, shard))]
    for number, name in enumerate(hf_names(mapping)):
        for shard, copy in copies:
            if copy.hf_name != name or name not in kept or (box := copy.hf_box.overlap(kept[name])) is None:
                continue
            here, there = copy.megatron_box, copy.hf_box
            moved = here.row - there.row, here.column - there.column
            for part in _rows_at_once(name, box, item_bytes[number], bucket_bytes):
                size = -(-part.num_elements * item_bytes[number] // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
                yield Cut(shard, number, part.moved(*moved), part, size)


def _rows_at_once(name: str, box: Box, item_bytes: int, bucket_bytes: int) -> Iterator[Box]:
    """Cuts a box by rows into parts that fit into a bucket."""
    row_bytes = box.num_columns * item_bytes
    if row_bytes > bucket_bytes:
        raise WeightMappingError(
            f"{name}: a row of {row_bytes} bytes exceeds the bucket of {bucket_bytes}; enlarge weight_sync.bucket_mib"
        )
    step = bucket_bytes // row_bytes
    for start in range(0, box.num_rows, step):
        yield Box(box.row + start, min(step, box.num_rows - start), box.column, box.num_columns)


def _sheet(items: Iterator[tuple[int, int]], bucket_bytes: int) -> Sheet:
    """Fills buckets in the order of the items; inside a bucket the shards follow each other by their numbers."""
    sheet = Sheet(bucket_bytes=(), runs={}, item_bytes={})
    totals: list[int] = []
    counts: dict[int, int] = {}
    sums: dict[int, int] = {}
    used = 0

    def close() -> None:
        start = 0
        for shard in sorted(counts):
            sheet.runs.setdefault(shard, []).append(Run(len(totals), start, counts[shard], sums[shard]))
            start += sums[shard]
        totals.append(start)
        counts.clear()
        sums.clear()

    for shard, size in items:
        if used and used + size > bucket_bytes:
            close()
            used = 0
        used += size
        counts[shard] = counts.get(shard, 0) + 1
        sums[shard] = sums.get(shard, 0) + size
        sheet.item_bytes.setdefault(shard, []).append(size)
    if used:
        close()
    return Sheet(bucket_bytes=tuple(totals), runs=sheet.runs, item_bytes=sheet.item_bytes)
