"""The plan: which slices of a rank's Megatron shard are which slices of the Hugging Face tensors. Pure.

The plan is one list of copies for the coordinates of a rank. Loading a model, converting one and pushing
weights to the sampler all follow it.

The ranks of a pipeline stage are split in two ways at once: ``tensor x context x data`` for everything but experts, and
``expert tensor x expert x expert data`` for experts. Ranks with equal tensor index hold the same dense parameters,
those with equal indices of the other split the same experts; the two sets differ.

A rank may hold several chunks of the model (virtual pipeline): chunk ``v`` of stage ``p`` holds the layers of virtual
stage ``v * pipeline_size + p``. Each chunk is a module of its own, whose layers count from 0, so with several chunks
``chunk_prefix`` tells their parameters apart.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from gtpo_megatron.config.parallel import LayerSplit, ParallelConfig
from gtpo_megatron.errors import WeightMappingError
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.families import LAYER_TABLES, Layer
from gtpo_megatron.weights.param_mapping import (
    ExpertParallel,
    ParamMapping,
    Replicated,
    SliceCopy,
    TensorParallel,
    Vocabulary,
    expert_of,
)

EMBEDDING, FINAL_NORM, OUTPUT = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


_FLOAT32 = ".e_score_correction_bias"
"""Ends the names of tensors that are float32 whatever the model's dtype: rounded biases would choose other experts."""


_CONVOLUTION = ".conv1d.weight"


def stays_float32(hf_name: str) -> bool:
    """Whether a tensor is float32 whatever the model's dtype is, on a disk, in training and in the sampler."""
    return hf_name.endswith(_FLOAT32)


_FUSED_NORMS = {
    "input_layernorm": "self_attention.linear_qkv.layer_norm",
    "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm",
}
"""Norms that Transformer Engine holds inside the linear layer after them: our name -> its name, less ``weight``."""


_GROUPED_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)")
"""Transformer Engine's grouped layer holds a rank's experts as ``weight0``, ``weight1``, ..., ``bias0``, ..."""


def table_name(megatron_name: str) -> str:
    """The name tables' spelling of a parameter, from that of Megatron's local or Transformer Engine's layers."""
    for ours, fused in _FUSED_NORMS.items():
        if megatron_name.endswith(f".{fused}_weight"):
            return megatron_name.removesuffix(f"{fused}_weight") + f"{ours}.weight"
    if (grouped := _GROUPED_EXPERT.fullmatch(megatron_name)) is not None:
        return f"{grouped[1]}.local_experts.{grouped[4]}.{grouped[2]}.{grouped[3]}"
    return megatron_name


def fused_name(name: str, *, has_experts: bool = False, has_own_attention: bool = False) -> str:
    """The spelling of Megatron's checkpoints, and Transformer Engine's of a norm, from that of the tables.

    Args:
        name: name of a parameter, in the tables' spelling.
        has_experts: its layer has experts; the norm before them is a layer of its own everywhere.
        has_own_attention: its layer has a class of ours in the place of attention; so the norm before it stands apart.
    """
    apart = {"pre_mlp_layernorm": has_experts, "input_layernorm": has_own_attention}
    for ours, fused in _FUSED_NORMS.items():
        if name.endswith(f".{ours}.weight") and not apart[ours]:
            return name.removesuffix(f"{ours}.weight") + f"{fused}_weight"
    return name


def chunk_prefix(chunk: int, virtual_size: int) -> str:
    """Prefix of a model chunk's parameter names in a rank's plan; empty if it is the only chunk."""
    return f"chunks.{chunk}." if virtual_size > 1 else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardCoordinates:
    """Position of a rank in the trainer's layout.

    Attributes:
        tensor_parallel: place among the ranks that share a layer's matrices, those of experts excepted.
        pipeline_size: ranks that share the layers.
        pipeline_stage: this rank's stage.
        virtual_size: model chunks a rank holds.
        last_stage_layers: layers of the last pipeline rank; None: as many as the others have.
        expert_parallel: place among the ranks that share a layer's experts.
        expert_tensor_parallel: place among the ranks that share the matrices of an expert.
    """

    tensor_parallel: TensorParallel
    pipeline_size: int = 1
    pipeline_stage: int = 0
    virtual_size: int = 1
    last_stage_layers: int | None = None
    expert_parallel: ExpertParallel = ExpertParallel(1, 0)
    expert_tensor_parallel: TensorParallel = TensorParallel(1, 0)

    @property
    def layer_split(self) -> LayerSplit:
        """Which layers each virtual stage of the whole pipeline holds."""
        return LayerSplit(self.pipeline_size, self.virtual_size, self.last_stage_layers)

    @property
    def stages(self) -> list[int]:
        """The virtual stage of each chunk that this rank holds."""
        return [chunk * self.pipeline_size + self.pipeline_stage for chunk in range(self.virtual_size)]

    def split_of(self, mapping: ParamMapping) -> TensorParallel:
        """The split that a parameter of this rank is subject to."""
        return self.tensor_parallel if expert_of(mapping) is None else self.expert_tensor_parallel


def shard_coordinates(parallel: ParallelConfig, rank: int) -> ShardCoordinates:
    """The coordinates of a rank, by its number in the trainer's world.

    Megatron numbers ranks with the tensor-parallel axis fastest and the pipeline axis slowest; inside a stage, the
    experts' tensor-parallel axis is fastest, then the expert-parallel one.
    """
    stage, index = divmod(rank, parallel.num_ranks // parallel.pipeline_parallel_size)
    tensor_size, expert_tensor_size = parallel.tensor_parallel_size, parallel.expert_tensor_parallel_size
    expert_size = parallel.expert_parallel_size
    return ShardCoordinates(
        tensor_parallel=TensorParallel(tensor_size, index % tensor_size),
        pipeline_size=parallel.pipeline_parallel_size,
        pipeline_stage=stage,
        virtual_size=parallel.virtual_pipeline_size,
        last_stage_layers=parallel.last_stage_layers,
        expert_parallel=ExpertParallel(expert_size, index // expert_tensor_size % expert_size),
        expert_tensor_parallel=TensorParallel(expert_tensor_size, index % expert_tensor_size),
    )


def stage_mappings(arch: Architecture, coordinates: ShardCoordinates, padded_vocab_size: int) -> Iterator[ParamMapping]:
    """Every parameter of every model chunk of a pipeline stage; of the experts those that the rank holds.

    With tied embeddings the last stage's output layer is the embedding: if it is a copy of its own (more than one
    stage), it maps to the same Hugging Face tensor.
    """
    if arch.family not in LAYER_TABLES:
        raise WeightMappingError(f"family {arch.family!r} has no name table; known: {', '.join(LAYER_TABLES)}")
    split = coordinates.layer_split
    if (problem := split.problem(arch.num_layers)) is not None:
        raise WeightMappingError(problem)
    experts = range(0) if arch.experts is None else coordinates.expert_parallel.held(arch.experts.num_experts)
    for chunk, stage in enumerate(coordinates.stages):
        prefix = chunk_prefix(chunk, coordinates.virtual_size)
        yield from chunk_mappings(
            arch,
            split=split,
            stage=stage,
            prefix=prefix,
            padded_vocab_size=padded_vocab_size,
            experts=experts,
        )


def chunk_mappings(
    arch: Architecture, *, split: LayerSplit, stage: int, prefix: str, padded_vocab_size: int, experts: range
) -> Iterator[ParamMapping]:
    """Every parameter of one model chunk.

    Args:
        arch: architecture of the model.
        split: split of its layers over the stages.
        stage: the virtual stage of the chunk.
        prefix: prefix of the parameters' names, as ``chunk_prefix`` gives it.
        padded_vocab_size: rows of the embedding of the trainer.
        experts: numbers of the experts that are in the chunk, of each of its layers that has experts.
    """

    def vocabulary(megatron_name: str, hf_name: str) -> Vocabulary:
        return Vocabulary(prefix + megatron_name, hf_name, arch.vocab_size, arch.hidden_size, padded_vocab_size)

    is_first, is_last = stage == 0, stage == split.num_stages - 1
    if is_first:
        yield vocabulary("embedding.word_embeddings.weight", EMBEDDING)
    for local, number in enumerate(split.layers(arch.num_layers, stage)):
        layer = Layer(number, f"{prefix}decoder.layers.{local}", f"model.layers.{number}", experts)
        for rows in LAYER_TABLES[arch.family]:
            yield from rows(arch, layer)
    if is_last:
        yield Replicated(f"{prefix}decoder.final_layernorm.weight", FINAL_NORM, arch.hidden_size)
        if not arch.tied_embeddings:
            yield vocabulary("output_layer.weight", OUTPUT)
        elif not is_first:
            yield vocabulary("output_layer.weight", EMBEDDING)


def is_tied_copy(arch: Architecture, mapping: ParamMapping) -> bool:
    """Whether a parameter is the last stage's copy of a tied embedding."""
    return arch.tied_embeddings and mapping.megatron_name.endswith("output_layer.weight")


def load_plan(arch: Architecture, coordinates: ShardCoordinates, padded_vocab_size: int) -> list[SliceCopy]:
    """Every copy that fills this rank's parameters from Hugging Face tensors."""
    return [
        copy
        for mapping in stage_mappings(arch, coordinates, padded_vocab_size)
        for copy in mapping.copies(coordinates.split_of(mapping))
    ]


def hf_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Name and shape of every Hugging Face tensor, in the order of the model.

    Biases and norms are vectors, a convolution over tokens has its channels one by one ``[channels, 1, tokens]``;
    everything else is a matrix.
    """
    whole = ShardCoordinates(tensor_parallel=TensorParallel(1, 0))
    extents: dict[str, tuple[int, int]] = {}
    for copy in load_plan(arch, whole, arch.vocab_size):
        box = copy.hf_box
        rows, columns = extents.get(copy.hf_name, (0, 0))
        extents[copy.hf_name] = (max(rows, box.row + box.num_rows), max(columns, box.column + box.num_columns))
    shapes = {name: (rows, columns) if columns > 1 else (rows,) for name, (rows, columns) in extents.items()}
    return {name: (shape[0], 1, *shape[1:]) if name.endswith(_CONVOLUTION) else shape for name, shape in shapes.items()}
