"""The plan: which slices of a rank's Megatron shard are which slices of the Hugging Face tensors. Pure.

The plan is one list of copies for a place ``(tensor rank, pipeline stage)``. Loading a checkpoint, exporting one,
converting one and pushing weights to the sampler all follow it.

A rank may hold several chunks of the model (virtual pipeline): chunk ``v`` of stage ``p`` holds the layers of virtual
stage ``v * pipeline_size + p``. Each chunk is a module of its own, whose layers count from 0, so with several chunks
``chunk_prefix`` tells their parameters apart.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from gtpo_megatron.errors import WeightMappingError
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.families import LAYER_TABLES
from gtpo_megatron.weights.param_mapping import ParamMapping, Replicated, SliceCopy, TensorParallel, Vocabulary

EMBEDDING, FINAL_NORM, OUTPUT = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


_FUSED_NORMS = {
    "input_layernorm": "self_attention.linear_qkv.layer_norm",
    "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm",
}
"""Norms that Transformer Engine holds inside the linear layer after them: our name -> its name, less ``weight``."""


def table_name(megatron_name: str) -> str:
    """The name tables' spelling of a parameter, from that of Megatron's local or Transformer Engine's layers."""
    for ours, fused in _FUSED_NORMS.items():
        if megatron_name.endswith(f".{fused}_weight"):
            return megatron_name.removesuffix(f"{fused}_weight") + f"{ours}.weight"
    return megatron_name


def fused_name(name: str) -> str:
    """Transformer Engine's spelling of a parameter, which is also that of Megatron's checkpoints, from the tables'."""
    for ours, fused in _FUSED_NORMS.items():
        if name.endswith(f".{ours}.weight"):
            return name.removesuffix(f"{ours}.weight") + f"{fused}_weight"
    return name


def chunk_prefix(chunk: int, virtual_size: int) -> str:
    """What the names of a model chunk's parameters begin with in a rank's plan; nothing if it is the only one."""
    return f"chunks.{chunk}." if virtual_size > 1 else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlace:
    """Where a rank stands in the trainer's layout.

    Attributes:
        tensor_parallel: among the ranks that share a layer's matrices.
        pipeline_size: ranks that share the layers.
        pipeline_stage: among them.
        virtual_size: model chunks a rank holds.
    """

    tensor_parallel: TensorParallel
    pipeline_size: int = 1
    pipeline_stage: int = 0
    virtual_size: int = 1

    @property
    def num_stages(self) -> int:
        """Virtual stages of the whole pipeline."""
        return self.pipeline_size * self.virtual_size

    @property
    def stages(self) -> list[int]:
        """The virtual stage of each chunk that this rank holds."""
        return [chunk * self.pipeline_size + self.pipeline_stage for chunk in range(self.virtual_size)]


def stage_mappings(arch: Architecture, place: ShardPlace, padded_vocab_size: int) -> Iterator[ParamMapping]:
    """Every parameter of every model chunk of a pipeline stage.

    With tied embeddings the last stage's output layer is the embedding: if it is a copy of its own (more than one
    stage), it maps to the same Hugging Face tensor.
    """
    if arch.family not in LAYER_TABLES:
        raise WeightMappingError(f"family {arch.family!r} has no name table; known: {', '.join(LAYER_TABLES)}")
    if arch.num_layers % place.num_stages:
        raise WeightMappingError(f"{arch.num_layers} layers do not split over {place.num_stages} virtual stages")
    for chunk, stage in enumerate(place.stages):
        prefix = chunk_prefix(chunk, place.virtual_size)
        yield from _chunk_mappings(arch, place.num_stages, stage, prefix, padded_vocab_size)


def _chunk_mappings(
    arch: Architecture, num_stages: int, stage: int, prefix: str, padded_vocab_size: int
) -> Iterator[ParamMapping]:
    def vocabulary(megatron_name: str, hf_name: str) -> Vocabulary:
        return Vocabulary(prefix + megatron_name, hf_name, arch.vocab_size, arch.hidden_size, padded_vocab_size)

    is_first, is_last = stage == 0, stage == num_stages - 1
    if is_first:
        yield vocabulary("embedding.word_embeddings.weight", EMBEDDING)
    layers = arch.num_layers // num_stages
    for local in range(layers):
        here, there = f"{prefix}decoder.layers.{local}", f"model.layers.{stage * layers + local}"
        for rows in LAYER_TABLES[arch.family]:
            yield from rows(arch, here, there)
    if is_last:
        yield Replicated(f"{prefix}decoder.final_layernorm.weight", FINAL_NORM, arch.hidden_size)
        if not arch.tied_embeddings:
            yield vocabulary("output_layer.weight", OUTPUT)
        elif not is_first:
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
        if mapping.megatron_name.endswith("output_layer.weight") and arch.tied_embeddings:
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
