"""The order in which a worker's slices of the model travel, and their sizes.

The model is cut into sections: the parameters of a virtual pipeline stage that are no experts', and those that are.
Only ranks of one pipeline stage hold slices of a section, each slice is in one shard, and no bucket has slices of two
sections. So a rank needs to know of a section which span of each bucket is its shard's: sizes, which are the same for
every layer and every expert of a kind. They are computed once and counted. Names and boxes are made only for what a
process sends or receives.

Inside the experts' section of a stage, experts of different expert-parallel ranks take turns, so that all of them send
at the same time.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import get_args

from gtpo_megatron.errors import WeightMappingError
from gtpo_megatron.weights.adapters import adapter_mappings
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.param_mapping import (
    Box,
    ExpertParallel,
    HeadParts,
    ParamMapping,
    SliceCopy,
    TensorParallel,
    expert_of,
    is_replicated,
)
from gtpo_megatron.weights.push.layout import (
    ALIGNMENT_BYTES,
    PushLayout,
    TrainerShape,
    WorkerCoordinates,
    trainer_shape,
)
from gtpo_megatron.weights.reshard import chunk_mappings, chunk_prefix, is_tied_copy, stays_float32

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Section:
    """Parameters of one kind of one virtual stage.

    Attributes:
        stage: virtual stage of the whole pipeline.
        has_experts: experts' parameters; else all others.
    """

    stage: int
    has_experts: bool


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """A slice of a parameter that one shard has and the workers of the same coordinates keep.

    Attributes:
        shard: number of the shard among those that the parameter is split into.
        name: number of the tensor among the parameter's Hugging Face tensors.
        here: the box in the shard.
        there: the box in the Hugging Face tensor.
        num_bytes: size in a bucket, up to the next slice.
    """

    shard: int
    name: int
    here: Box
    there: Box
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ShardSpan:
    """The bytes of one shard in one bucket of a section.

    Attributes:
        bucket: number in the section.
        start: place of the first byte in the bucket.
        num_slices: slices, which follow each other.
        num_bytes: size of all of them.
    """

    bucket: int
    start: int
    num_slices: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SectionSizes:
    """Sizes of a section for the workers of the same coordinates.

    Attributes:
        bucket_bytes: size of every bucket.
        spans: shard -> its spans, in the order of the buckets; shards without a slice are absent.
        slice_bytes: shard -> sizes of its slices, in order.
    """

    bucket_bytes: tuple[int, ...]
    spans: dict[int, list[ShardSpan]]
    slice_bytes: dict[int, list[int]]

    def shard_bytes(self, shard: int) -> int:
        """Bytes of all slices of a shard."""
        return sum(span.num_bytes for span in self.spans.get(shard, ()))


class Sections:
    """The sections of a model for a trainer's layout; results are kept, since workers and layers repeat.

    Args:
        arch: architecture of the model.
        layout: layout of the push.

    Raises:
        WeightMappingError: the model does not split over the layout, or its ranks have different ones.
    """

    def __init__(self, arch: Architecture, layout: PushLayout) -> None:
        self._arch, self._layout = arch, layout
        self.shape: TrainerShape = trainer_shape(layout)
        if (problem := self.shape.layer_split.problem(arch.num_layers)) is not None:
            raise WeightMappingError(problem)
        self._sizes: dict[tuple[object, ...], SectionSizes] = {}
        self._slices: dict[tuple[object, ...], tuple[ShardSlice, ...]] = {}
        self._kinds: dict[Section, int] = {}
        self._kind_of_boxes: dict[tuple[object, ...], int] = {}
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

    def sizes(self, section: Section, coordinates: WorkerCoordinates) -> SectionSizes:
        """Sizes of every bucket, and of every shard's slices in it."""
        # of stages each keeps other layers, so that sections of a kind differ
        which = section.stage if coordinates.pipeline_size > 1 else self._kind(section)
        key = (section.has_experts, which, coordinates)
        if key not in self._sizes:
            sizes_of = self._expert_sizes if section.has_experts else self._dense_sizes
            self._sizes[key] = _fill_buckets(sizes_of(section, coordinates), self._layout.bucket_bytes)
        return self._sizes[key]

    def copies(self, section: Section, shard: int, coordinates: WorkerCoordinates) -> list[SliceCopy]:
        """The slices of a shard, in order."""
        group, shard = divmod(shard, self.shape.expert_tensor) if section.has_experts else (0, shard)
        found: list[SliceCopy] = []
        for mapping in self.mappings(section, group):
            names = hf_names(mapping)
            if not (self._keeps(coordinates, expert_of(mapping)) and coordinates.keeps(names[0], self._arch)):
                continue
            found += [
                SliceCopy(mapping.megatron_name, one.here, names[one.name], one.there)
                for one in self.slices(mapping, coordinates)
                if one.shard == shard
            ]
        return found

    def mappings(self, section: Section, group: int = 0) -> list[ParamMapping]:
        """The parameters of a section, of one expert-parallel rank's experts if it has any."""
        if (section, group) not in self._mappings:
            chunk, size = section.stage // self.shape.pipeline, self.shape.expert
            experts = ExpertParallel(size, group).held(self._num_experts) if section.has_experts else range(0)
            split, adapter = self.shape.layer_split, self._layout.adapter
            if adapter is not None:
                found = adapter_mappings(self._arch, adapter, split=split, stage=section.stage)
            else:
                found = chunk_mappings(
                    self._arch,
                    split=split,
                    stage=section.stage,
                    prefix=chunk_prefix(chunk, self.shape.virtual),
                    padded_vocab_size=self._layout.padded_vocab_size,
                    experts=experts,
                )
            self._mappings[section, group] = [
                mapping
                for mapping in found
                if (expert_of(mapping) is not None) == section.has_experts and not is_tied_copy(self._arch, mapping)
            ]
        return self._mappings[section, group]

    def slices(self, mapping: ParamMapping, coordinates: WorkerCoordinates) -> tuple[ShardSlice, ...]:
        """The slices of a parameter that workers of these coordinates keep: by tensor, and then by shard.

        Raises:
            WeightMappingError: it does not split over shards or workers, or a bucket cannot hold a single row.
        """
        is_expert = expert_of(mapping) is not None
        key = (coordinates, *self._boxes(mapping))
        if key not in self._slices:
            element_bytes = self._element_bytes(mapping)
            num_shards = self.shape.expert_tensor if is_expert else self.shape.tensor
            whole_experts = is_expert and coordinates.expert_parallel
            split = TensorParallel(1, 0) if whole_experts else coordinates.tensor_parallel
            found = _shard_slices(mapping, num_shards, split, element_bytes, self._layout.bucket_bytes)
            self._slices[key] = tuple(found)
        return self._slices[key]

    def _kind(self, section: Section) -> int:
        """A number that sections have in common whose sizes are equal, as what they depend on is.

        Of experts that is how many layers have them; of the others their parameters' boxes, in order.
        """
        if section.has_experts:
            return sum(self._expert_layers(section.stage))
        if section not in self._kinds:
            boxes = tuple(self._boxes(mapping) for mapping in self.mappings(section))
            self._kinds[section] = self._kind_of_boxes.setdefault(boxes, len(self._kind_of_boxes))
        return self._kinds[section]

    def _boxes(self, mapping: ParamMapping) -> tuple[object, ...]:
        """Everything that the slices of a parameter depend on, but the worker."""
        fields_of_boxes = (getattr(mapping, name) for name in _BOX_FIELDS[type(mapping)])
        return (type(mapping), expert_of(mapping) is not None, self._element_bytes(mapping), *fields_of_boxes)

    def _element_bytes(self, mapping: ParamMapping) -> tuple[int, ...]:
        """Of each of a parameter's Hugging Face tensors, as they travel."""
        return tuple(FLOAT32_BYTES if stays_float32(name) else self._layout.itemsize for name in hf_names(mapping))

    def _expert_layers(self, stage: int) -> tuple[bool, ...]:
        """Per layer of a virtual stage whether it has experts that travel."""
        if self._arch.experts is None or self._layout.adapter is not None:
            return ()
        layers = self._layers(stage)
        return self._arch.experts.layers[layers.start : layers.stop]

    def _layers(self, stage: int) -> range:
        return self.shape.layer_split.layers(self._arch.num_layers, stage)

    def _keeps(self, coordinates: WorkerCoordinates, expert: int | None) -> bool:
        if expert is None or not coordinates.expert_parallel:
            return True
        split = coordinates.tensor_parallel
        return expert in ExpertParallel(split.size, split.index).held(self._num_experts)

    def _dense_sizes(self, section: Section, coordinates: WorkerCoordinates) -> Iterator[tuple[int, int]]:
        for mapping in self.mappings(section):
            if coordinates.keeps(hf_names(mapping)[0], self._arch):  # a parameter's tensors are of one layer
                for one in self.slices(mapping, coordinates):
                    yield one.shard, one.num_bytes

    def _expert_sizes(self, section: Section, coordinates: WorkerCoordinates) -> Iterator[tuple[int, int]]:
        held = ExpertParallel(self.shape.expert, 0).held(self._num_experts)
        first = [mapping for mapping in self.mappings(section) if expert_of(mapping) == held[0]]
        layers = sum(self._expert_layers(section.stage))
        of_expert = [one for mapping in first[: len(first) // layers] for one in self.slices(mapping, coordinates)]
        layer: list[tuple[int, int]] = []
        for local in held:
            for group in range(self.shape.expert):
                if self._keeps(coordinates, group * len(held) + local):
                    layer += [(group * self.shape.expert_tensor + one.shard, one.num_bytes) for one in of_expert]
        mine = coordinates.layers(self._arch.num_layers)
        here = zip(self._layers(section.stage), self._expert_layers(section.stage), strict=True)
        for _ in range(sum(has_experts and number in mine for number, has_experts in here)):
            yield from layer


_BOX_FIELDS = {
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
    if isinstance(mapping, HeadParts):
        return list(dict.fromkeys(name for name, _, _ in mapping.parts))
    return list(dict.fromkeys(getattr(mapping, field) for field in _NAMES[type(mapping)]))


def _shard_slices(
    mapping: ParamMapping, num_shards: int, split: TensorParallel, element_bytes: tuple[int, ...], bucket_bytes: int
) -> Iterator[ShardSlice]:
    kept = list(mapping.kept(split))
    # any shard has a replicated tensor: that one gives it which the worker takes other rows or columns from
    shards = [split.index * num_shards // split.size] if is_replicated(mapping) else range(num_shards)
    copies = [(shard, copy) for shard in shards for copy in mapping.copies(TensorParallel(num_shards, shard))]
    for number, name in enumerate(hf_names(mapping)):
        wanted = [box for tensor, box in kept if tensor == name]
        for (shard, copy), one in itertools.product(copies, wanted):
            if copy.hf_name != name or (box := copy.hf_box.overlap(one)) is None:
                continue
            here, there = copy.megatron_box, copy.hf_box
            moved = here.row - there.row, here.column - there.column
            for part in _rows_at_once(name, box, element_bytes[number], bucket_bytes):
                size = -(-part.num_elements * element_bytes[number] // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
                yield ShardSlice(shard, number, part.moved(*moved), part, size)


def _rows_at_once(name: str, box: Box, element_bytes: int, bucket_bytes: int) -> Iterator[Box]:
    """Cuts a box by rows into parts that fit into a bucket."""
    row_bytes = box.num_columns * element_bytes
    if row_bytes > bucket_bytes:
        raise WeightMappingError(
            f"{name}: a row of {row_bytes} bytes exceeds the bucket of {bucket_bytes}; enlarge weight_sync.bucket_mib"
        )
    step = bucket_bytes // row_bytes
    for start in range(0, box.num_rows, step):
        yield Box(box.row + start, min(step, box.num_rows - start), box.column, box.num_columns)


def _fill_buckets(slices: Iterator[tuple[int, int]], bucket_bytes: int) -> SectionSizes:
    """Fills buckets in the order of the slices; inside a bucket the shards follow each other by their numbers."""
    spans: dict[int, list[ShardSpan]] = {}
    slice_bytes: dict[int, list[int]] = {}
    totals: list[int] = []
    counts: dict[int, int] = {}
    sums: dict[int, int] = {}
    used = 0

    def close() -> None:
        start = 0
        for shard in sorted(counts):
            spans.setdefault(shard, []).append(ShardSpan(len(totals), start, counts[shard], sums[shard]))
            start += sums[shard]
        totals.append(start)
        counts.clear()
        sums.clear()

    for shard, size in slices:
        if used and used + size > bucket_bytes:
            close()
            used = 0
        used += size
        counts[shard] = counts.get(shard, 0) + 1
        sums[shard] = sums.get(shard, 0) + size
        slice_bytes.setdefault(shard, []).append(size)
    if used:
        close()
    return SectionSizes(bucket_bytes=tuple(totals), spans=spans, slice_bytes=slice_bytes)
