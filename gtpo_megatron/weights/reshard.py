"""The plan: which slices of a rank's Megatron shard are which slices of the Hugging Face tensors. Pure.

The plan is one list of copies for a place ``(tensor rank, pipeline stage)``. Loading a checkpoint, exporting one and
pushing weights to the sampler all follow it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gtpo_megatron.errors import WeightMappingError
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.families import qwen2
from gtpo_megatron.weights.param_mapping import ParamMapping, Replicated, SliceCopy, TensorParallel, Vocabulary

LayerTable = Callable[[Architecture, int, int], Iterator[ParamMapping]]

LAYER_TABLES: dict[str, LayerTable] = {"qwen2": qwen2.layer_mappings}
"""Family -> mappings of one layer; to add a family, write its file and add it here and in ``architecture.py``."""

EMBEDDING, FINAL_NORM, OUTPUT = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlace:
    """Where a rank stands in the trainer's layout."""

    tensor_parallel: TensorParallel
    pipeline_size: int = 1
    pipeline_stage: int = 0

    @property
    def is_first_stage(self) -> bool:
        """This stage holds the embedding."""
        return self.pipeline_stage == 0

    @property
    def is_last_stage(self) -> bool:
        """This stage holds the final norm and the output layer."""
        return self.pipeline_stage == self.pipeline_size - 1


def stage_mappings(arch: Architecture, place: ShardPlace, padded_vocab_size: int) -> Iterator[ParamMapping]:
    """Every parameter of a pipeline stage.

    With tied embeddings the last stage's output layer is the embedding: where it is a copy of its own (more than one
    stage), it maps to the same Hugging Face tensor.
    """
    if arch.family not in LAYER_TABLES:
        raise WeightMappingError(f"family {arch.family!r} has no name table; known: {', '.join(LAYER_TABLES)}")

    def vocabulary(megatron_name: str, hf_name: str) -> Vocabulary:
        return Vocabulary(megatron_name, hf_name, arch.vocab_size, arch.hidden_size, padded_vocab_size)

    if place.is_first_stage:
        yield vocabulary("embedding.word_embeddings.weight", EMBEDDING)
    layers = arch.num_layers // place.pipeline_size
    for local_layer in range(layers):
        yield from LAYER_TABLES[arch.family](arch, place.pipeline_stage * layers + local_layer, local_layer)
    if place.is_last_stage:
        yield Replicated("decoder.final_layernorm.weight", FINAL_NORM, arch.hidden_size)
        if not arch.tied_embeddings:
            yield vocabulary("output_layer.weight", OUTPUT)
        elif not place.is_first_stage:
            yield vocabulary("output_layer.weight", EMBEDDING)


def load_plan(arch: Architecture, place: ShardPlace, padded_vocab_size: int) -> list[SliceCopy]:
    """Every copy that fills this rank's parameters from Hugging Face tensors."""
    return [
        copy
        for mapping in stage_mappings(arch, place, padded_vocab_size)
        for copy in mapping.copies(place.tensor_parallel)
    ]


def export_plan(arch: Architecture, place: ShardPlace, padded_vocab_size: int) -> list[SliceCopy]:
    """The copies that this rank contributes to the Hugging Face tensors.

    Over all places of one data-parallel replica, every element of every tensor is written exactly once: replicated
    tensors by tensor rank 0 only, a tied embedding by the first stage only.
    """
    plan: list[SliceCopy] = []
    for mapping in stage_mappings(arch, place, padded_vocab_size):
        if isinstance(mapping, Replicated) and place.tensor_parallel.index > 0:
            continue
        if mapping.megatron_name == "output_layer.weight" and arch.tied_embeddings:
            continue
        plan += mapping.copies(place.tensor_parallel)
    return plan


def hf_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Name and shape of every Hugging Face tensor, in the order of the model.

    Biases and norms are vectors; everything else is a matrix.
    """
    whole = ShardPlace(tensor_parallel=TensorParallel(1, 0))
    extents: dict[str, tuple[int, int]] = {}
    for copy in load_plan(arch, whole, arch.vocab_size):
        box = copy.hf_box
        rows, columns = extents.get(copy.hf_name, (0, 0))
        extents[copy.hf_name] = (max(rows, box.row + box.num_rows), max(columns, box.column + box.num_columns))
    return {name: (rows, columns) if columns > 1 else (rows,) for name, (rows, columns) in extents.items()}
