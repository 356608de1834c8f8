"""Low-rank adapters: the projections that have them, and which part of A and B a rank holds. Pure.

A projection of the model's folder has one adapter, ``A [rank, columns]`` and ``B [rows, rank]``, as peft has it. Where
Megatron fuses projections into one linear layer (query, key and value; gate and up), that layer has several.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import Tensor

from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.config.parallel import LayerSplit
from gtpo_megatron.weights.adapter_shapes import check_adaptable
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.param_mapping import (
    QKV,
    ColumnParallel,
    GatedMLP,
    ParamMapping,
    Replicated,
    RowParallel,
    TensorParallel,
    expert_of,
)
from gtpo_megatron.weights.reshard import ShardCoordinates, chunk_mappings, stage_mappings

PEFT_PREFIX = "base_model.model."
"""Begins peft's names."""


@dataclass(frozen=True, slots=True)
class Projection:
    """A matrix of the model's folder that can have an adapter.

    Attributes:
        name: ``model.layers.3.self_attn.q_proj``.
        rows: outputs.
        columns: inputs.
        splits_rows: tensor-parallel ranks share its rows, and so those of B; else its columns, and so those of A.
    """

    name: str
    rows: int
    columns: int
    splits_rows: bool

    @property
    def target(self) -> str:
        """The last part of the name, by which a configuration chooses it."""
        return self.name.rpartition(".")[2]

    def shapes(self, rank: int, tensor_size: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of the A and B that a tensor-parallel rank holds, for adapters of this rank."""
        rows, columns = (tensor_size, 1) if self.splits_rows else (1, tensor_size)
        return (rank, self.columns // columns), (self.rows // rows, rank)

    def shard(self, a: Tensor, b: Tensor, tp: TensorParallel) -> tuple[Tensor, Tensor]:
        """A rank's part of the whole A and B, as views."""
        if self.splits_rows:
            return a, b.chunk(tp.size, 0)[tp.index]
        return a.chunk(tp.size, 1)[tp.index], b


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """A linear layer of Megatron's with the projections that are fused in it.

    Attributes:
        name: name of the layer in the name tables, less ``.weight``.
        projections: names of the projections, in the order of the layer's outputs.
        groups: how often the projections take turns in the outputs: the whole model's query groups, else 1.
    """

    name: str
    projections: tuple[Projection, ...]
    groups: int = 1


def adapted_linears(
    arch: Architecture, coordinates: ShardCoordinates, targets: Collection[str]
) -> Iterator[AdaptedLinear]:
    """The linear layers of a rank that have adapters, with all their projections, of which some may be no targets.

    Args:
        arch: architecture of the model.
        coordinates: coordinates of the rank.
        targets: see ``AdapterConfig``.
    """
    chosen = set(targets)
    for mapping in stage_mappings(arch, coordinates, arch.padded_vocab_size(coordinates.tensor_parallel.size, 1)):
        linear = _linear(mapping)
        if linear is not None and any(one.target in chosen for one in linear.projections):
            yield linear


def _linear(mapping: ParamMapping) -> AdaptedLinear | None:
    """The layer that a parameter is the weight of; None if it can have no adapter."""
    name = mapping.megatron_name.removesuffix(".weight")
    if name == mapping.megatron_name or expert_of(mapping) is not None:
        return None
    match mapping:
        case QKV():
            rows = mapping.num_query_groups * mapping.head_size
            parts = [
                (mapping.query_name, mapping.num_heads * mapping.head_size),
                (mapping.key_name, rows),
                (mapping.value_name, rows),
            ]
        case GatedMLP():
            parts = [(mapping.gate_name, mapping.rows), (mapping.up_name, mapping.rows)]
        case ColumnParallel() | RowParallel():
            parts = [(mapping.hf_name, mapping.rows)]
        case _:
            return None
    if len({tensor for tensor, _ in parts}) < len(parts):
        return None  # peft has one adapter for a tensor that holds several projections
    by_rows = not isinstance(mapping, RowParallel)
    return AdaptedLinear(
        name,
        tuple(Projection(tensor.removesuffix(".weight"), rows, mapping.columns, by_rows) for tensor, rows in parts),
        mapping.num_query_groups if isinstance(mapping, QKV) else 1,
    )


def tensor_names(projection: Projection) -> tuple[str, str]:
    """Names that peft gives to the A and B of a projection."""
    name = f"{PEFT_PREFIX}{projection.name}.lora"
    return f"{name}_A.weight", f"{name}_B.weight"


def tensor_shapes(arch: Architecture, config: AdapterConfig) -> dict[str, tuple[int, int]]:
    """Name, as of peft, and shape of the whole A and B of every projection that is a target."""
    return {
        name: shape
        for one in chosen_projections(arch, config)
        for name, shape in zip(tensor_names(one), one.shapes(config.rank, 1), strict=True)
    }


def adapter_mappings(
    arch: Architecture, config: AdapterConfig, *, split: LayerSplit, stage: int
) -> Iterator[ParamMapping]:
    """A and B of the targets of one model chunk, for a push without the weights; a rank has them as ``<name>.a``.

    Args:
        arch: architecture of the model.
        config: configuration of the adapters.
        split: split of the layers over the stages.
        stage: the virtual stage of the chunk.
    """
    chunk = chunk_mappings(
        arch, split=split, stage=stage, prefix="", padded_vocab_size=arch.vocab_size, experts=range(0)
    )
    for mapping in chunk:
        linear = _linear(mapping)
        for one in linear.projections if linear is not None else ():
            if one.target in config.targets:
                name, (a, b), rank = one.name, tensor_names(one), config.rank
                if one.splits_rows:
                    yield Replicated(f"{name}.a", a, rank, one.columns)
                    yield ColumnParallel(f"{name}.b", b, one.rows, rank)
                else:
                    yield RowParallel(f"{name}.a", a, rank, one.columns)
                    yield Replicated(f"{name}.b", b, one.rows, rank)


def projections(arch: Architecture) -> list[Projection]:
    """All projections of the model that can have adapters, in its order."""
    whole = ShardCoordinates(tensor_parallel=TensorParallel(1, 0))
    every = {
        one.name: one
        for mapping in stage_mappings(arch, whole, arch.vocab_size)
        if (linear := _linear(mapping)) is not None
        for one in linear.projections
    }
    return list(every.values())


def chosen_projections(arch: Architecture, config: AdapterConfig) -> list[Projection]:
    """Those that are targets.

    Raises:
        ConfigError: as :func:`check_adaptable`.
    """
    check_adaptable(arch, config)
    return [one for one in projections(arch) if one.target in config.targets]
