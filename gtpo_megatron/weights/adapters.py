"""Low-rank adapters: the projections that have them, and which part of A and B a rank holds. Pure.

A projection of the model's folder has one adapter, ``A [rank, columns]`` and ``B [rows, rank]``, as peft has it. Where
Megatron fuses projections into one linear layer (query, key and value; gate and up), that layer has several. Where the
folder fuses them, or peft does (an expert's gate and up), one A serves several blocks of B, which ranks share one by
one.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.config.parallel import LayerSplit
from gtpo_megatron.weights.adapter_shapes import Split, check_adaptable, targets_of
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.param_mapping import (
    Box,
    ColumnParallel,
    GatedMLP,
    ParamMapping,
    Replicated,
    RowParallel,
    TensorParallel,
    Vocabulary,
    expert_of,
    is_replicated,
)
from gtpo_megatron.weights.reshard import ShardCoordinates, chunk_mappings, stage_mappings

PEFT_PREFIX = "base_model.model."
"""Begins peft's names."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of B that tensor-parallel ranks share evenly, and whose they are.

    Attributes:
        tensor: tensor of the name tables, ``model.layers.3.self_attn.q_proj.weight``.
        first: first of its rows.
        rows: how many of them.
    """

    tensor: str
    first: int
    rows: int


@dataclass(frozen=True, slots=True)
class Projection:
    """A matrix of the model's folder that can have an adapter.

    Attributes:
        name: ``model.layers.3.self_attn.q_proj``; of experts ``model.layers.3.mlp.experts.gate_up_proj``.
        columns: inputs.
        blocks: the rows, which are its outputs, in order.
        split: tensor-parallel ranks share the rows of each block, and so those of B; or the columns, and so those of A;
            or nothing.
        expert: number of the expert that it is of; None: of none.
    """

    name: str
    columns: int
    blocks: tuple[Block, ...]
    split: Split
    expert: int | None = None

    @property
    def target(self) -> str:
        """The part of the name by which a configuration chooses it."""
        return ".".join(self.name.split(".")[-1 if self.expert is None else -2 :])

    @property
    def rows(self) -> int:
        """Outputs."""
        return sum(block.rows for block in self.blocks)

    def shapes(self, rank: int, tensor_size: int) -> tuple[tuple[int, int], ...]:
        """Shapes of the A and of each block of B that a tensor-parallel rank holds, for adapters of this rank."""
        rows = tensor_size if self.split == "rows" else 1
        columns = tensor_size if self.split == "columns" else 1
        return (rank, self.columns // columns), *((block.rows // rows, rank) for block in self.blocks)

    def shard(self, a: Tensor, b: Tensor, tp: TensorParallel) -> tuple[Tensor, ...]:
        """A rank's part of the whole A, and of each block of the whole B, as views."""
        blocks = torch.split(b, [block.rows for block in self.blocks])
        if self.split == "rows":
            blocks = tuple(block.chunk(tp.size, 0)[tp.index] for block in blocks)
        return a.chunk(tp.size, 1)[tp.index] if self.split == "columns" else a, *blocks


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """A linear layer of Megatron's with the projections that are fused in it.

    Attributes:
        mapping: its weight's.
        projections: projections of the folder, some of which may be no targets.
    """

    mapping: ParamMapping
    projections: tuple[Projection, ...]

    @property
    def name(self) -> str:
        """Name of the layer in the name tables."""
        return self.mapping.megatron_name.removesuffix(".weight")

    def order(self, tp: TensorParallel) -> list[int]:
        """For each output of the layer on a rank its place among the rank's blocks, one projection after another."""
        places: dict[str, list[tuple[int, int, int]]] = {}
        end = 0
        for projection in self.projections:
            for block in projection.blocks:
                rows = block.rows // tp.size if projection.split == "rows" else block.rows
                first = block.first + (tp.index * rows if projection.split == "rows" else 0)
                places.setdefault(block.tensor, []).append((first, rows, end))
                end += rows
        found = [0] * end
        for copy in self.mapping.copies(tp):
            row = copy.hf_box.row
            [start] = [
                place + row - first for first, rows, place in places[copy.hf_name] if first <= row < first + rows
            ]
            here = copy.megatron_box
            found[here.row : here.row + here.num_rows] = range(start, start + here.num_rows)
        return found


def adapted_linears(
    arch: Architecture, coordinates: ShardCoordinates, config: AdapterConfig
) -> Iterator[AdaptedLinear]:
    """The linear layers of a rank that have adapters, with all their projections, of which some may be no targets.

    Args:
        arch: architecture of the model.
        coordinates: coordinates of the rank.
        config: configuration of the adapters.
    """
    chosen = set(targets_of(arch, config))
    for mapping in stage_mappings(arch, coordinates, arch.padded_vocab_size(coordinates.tensor_parallel.size, 1)):
        linear = _linear(mapping)
        if linear is not None and any(one.target in chosen for one in linear.projections):
            yield linear


def _linear(mapping: ParamMapping) -> AdaptedLinear | None:
    """The layer that a parameter is the weight of; None if it can have no adapter: vectors, routers, vocabularies."""
    name = mapping.megatron_name
    if isinstance(mapping, Vocabulary) or mapping.columns == 1 or not name.endswith(".weight") or ".router." in name:
        return None
    split: Split = "none" if is_replicated(mapping) else "columns" if isinstance(mapping, RowParallel) else "rows"
    expert = expert_of(mapping)
    blocks = [Block(tensor, box.row, box.num_rows) for tensor, box in _blocks(mapping)]
    if expert is not None:
        layer = blocks[0].tensor.partition(".experts.")[0].replace(".block_sparse_moe", ".mlp")
        stacked = f"{layer}.experts.{'gate_up_proj' if isinstance(mapping, GatedMLP) else 'down_proj'}"
        return AdaptedLinear(mapping, (Projection(stacked, mapping.columns, tuple(blocks), "none", expert),))
    by_tensor: dict[str, list[Block]] = {}
    for block in blocks:
        by_tensor.setdefault(block.tensor, []).append(block)
    return AdaptedLinear(
        mapping,
        tuple(
            Projection(tensor.removesuffix(".weight"), mapping.columns, tuple(found), split)
            for tensor, found in by_tensor.items()
        ),
    )


def _blocks(mapping: ParamMapping) -> Iterator[tuple[str, Box]]:
    """The matrices that a parameter is made of."""
    whole = TensorParallel(1, 0)
    if isinstance(mapping, GatedMLP):  # whatever a sampler's workers share
        return iter([(copy.hf_name, copy.hf_box) for copy in mapping.copies(whole)])
    return mapping.kept(whole)


def tensor_names(projection: Projection, targets: Collection[str]) -> tuple[str, str]:
    """Names that peft gives to the A and B of a projection, or of all experts'.

    peft wraps the tensors of all experts one around the other, in their order.

    Args:
        projection: the projection.
        targets: names of all projections that have adapters.
    """
    return module_names(projection.name, projection.target, targets)


def module_names(name: str, target: str, targets: Collection[str]) -> tuple[str, str]:
    """The same, by the name of the projection, and by that of the target that it is."""
    if target.startswith("experts."):
        is_inner = target == "experts.gate_up_proj" and "experts.down_proj" in targets
        name = name.rpartition(".")[0] + (".base_layer" if is_inner else "")
    return f"{PEFT_PREFIX}{name}.lora_A.weight", f"{PEFT_PREFIX}{name}.lora_B.weight"


def tensor_shapes(arch: Architecture, config: AdapterConfig) -> dict[str, tuple[int, int]]:
    """Name, as of peft, and shape of the whole A and B of every projection that is a target."""
    targets, num_experts = targets_of(arch, config), 1 if arch.experts is None else arch.experts.num_experts
    found: dict[str, tuple[int, int]] = {}
    for one in chosen_projections(arch, config):
        rank = config.rank * (1 if one.expert is None else num_experts)
        found |= zip(tensor_names(one, targets), ((rank, one.columns), (one.rows, rank)), strict=True)
    return found


def adapter_mappings(
    arch: Architecture, config: AdapterConfig, *, split: LayerSplit, stage: int
) -> Iterator[ParamMapping]:
    """A and B of the targets of one model chunk, for a push without the weights; a rank has them as ``<name>.a``.

    Args:
        arch: architecture of the model.
        config: configuration of the adapters, which may travel alone.
        split: split of the layers over the stages.
        stage: the virtual stage of the chunk.
    """
    targets, rank = targets_of(arch, config), config.rank
    chunk = chunk_mappings(
        arch, split=split, stage=stage, prefix="", padded_vocab_size=arch.vocab_size, experts=range(0)
    )
    for mapping in chunk:
        linear = _linear(mapping)
        for one in linear.projections if linear is not None else ():
            if one.target in targets:
                name, (a, b) = one.name, tensor_names(one, targets)
                if one.split == "rows":
                    yield Replicated(f"{name}.a", a, rank, one.columns)
                    yield ColumnParallel(f"{name}.b", b, one.rows, rank)
                else:
                    yield RowParallel(f"{name}.a", a, rank, one.columns)
                    yield Replicated(f"{name}.b", b, one.rows, rank)


def projections(arch: Architecture) -> list[Projection]:
    """All projections of the model that can have adapters, in its order."""
    whole = ShardCoordinates(tensor_parallel=TensorParallel(1, 0))
    every = {
        (one.name, one.expert): one
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
    targets = targets_of(arch, config)
    return [one for one in projections(arch) if one.target in targets]
