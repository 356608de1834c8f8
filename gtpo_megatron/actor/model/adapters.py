"""Low-rank adapters beside Megatron's frozen linear layers: their modules, and the weights with them merged in.

They are joined to the layers by hooks, so Megatron's own layers and Transformer Engine's have the same ones. ``r`` is
the rank, ``S`` the tokens of a micro-batch, of which a rank has ``S / tp`` under sequence parallelism.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import tensor_parallel as megatron
from torch import Tensor
from torch.nn.functional import linear, pad

from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.weights.adapter_shapes import targets_of
from gtpo_megatron.weights.adapters import Projection, adapted_linears
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.param_mapping import TensorParallel
from gtpo_megatron.weights.reshard import chunk_prefix, shard_coordinates

CHILD = "adapter"
"""Name of an adapter's module in the layer that it is joined to."""


class LowRank(torch.nn.Module):
    """A and B of one projection: this rank's part of them.

    Args:
        projection: of the model's folder.
        a: ``[r, inputs]``, the whole.
        b: ``[outputs, r]``, the whole.
        tp: place among the tensor-parallel ranks.
        sequence_parallel: tokens are shared by the tensor-parallel ranks.

    The attributes are Megatron's: which parts a norm of gradients counts once a rank, and which are the same on all
    tensor-parallel ranks but have the gradients of a rank's own tokens, which are summed after the backward pass.
    Experts are other ones on every rank, or have other ranks with the same ones.
    """

    def __init__(
        self, projection: Projection, a: Tensor, b: Tensor, tp: TensorParallel, *, sequence_parallel: bool
    ) -> None:
        super().__init__()
        self.projection = projection
        a, *blocks = projection.shard(a, b, tp)
        self.a = torch.nn.Parameter(a.clone())
        self.blocks = torch.nn.ParameterList(torch.nn.Parameter(block.clone()) for block in blocks)
        is_experts = projection.expert is not None
        shares = {0: is_experts or projection.split == "rows", 1: is_experts or projection.split == "columns"}
        for one, axis in ((self.a, 1), *((block, 0) for block in self.blocks)):
            if shares[axis]:
                megatron.set_tensor_model_parallel_attributes(one, True, axis, 1)
            else:
                setattr(one, "sequence_parallel", sequence_parallel)  # noqa: B010 - not a field that torch knows
            if is_experts:
                setattr(one, "allreduce", False)  # noqa: B010 - as ``mark_experts`` says of the weights

    def tensors(self) -> dict[str, Tensor]:
        """Its parts by the ends of their names in checkpoints: ``a``, and ``b``, or ``b0``, ``b1`` and so on."""
        names = ["b"] if len(self.blocks) == 1 else [f"b{number}" for number in range(len(self.blocks))]
        return {"a": self.a, **dict(zip(names, self.blocks, strict=True))}


class LinearAdapter(torch.nn.Module):
    """The adapters of a linear layer.

    Args:
        parts: adapters of the layer's projections, in its order; None: the projection has none.
        widths: outputs of each block of each projection on this rank.
        order: for each of the layer's outputs its place among those of the blocks.
        scale: ``s``.
        sequence_parallel: see ``LowRank``.
    """

    def __init__(
        self,
        parts: Sequence[LowRank | None],
        *,
        widths: Sequence[Sequence[int]],
        order: Sequence[int],
        scale: float,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        self.parts = [part for part in parts if part is not None]
        self._modules_of_parts = torch.nn.ModuleList(self.parts)  # a list that torch looks into
        self._has_part, self._widths = [part is not None for part in parts], [sum(one) for one in widths]
        self._scale, self._sequence_parallel = scale, sequence_parallel
        self._split = self.parts[0].projection.split
        self._order: Tensor | None = None
        if list(order) != list(range(len(order))):
            self._order = torch.tensor(order, device=self.parts[0].a.device)
        self.is_on = True

    def forward(self, outputs: Tensor, inputs: Tensor) -> Tensor:
        """``y + s B A x`` of this rank's outputs, in their dtype.

        One product adds to the outputs, which are far wider than what is added in: they are read and written once.

        Args:
            outputs: ``y [..., outputs]`` of the layer.
            inputs: ``x [..., inputs]`` that it got.

        Collectives: those of the layer itself, of ``r`` numbers a token and projection instead of a hidden state.
        """
        low = self._exchange(linear(inputs.to(self.parts[0].a.dtype), self._a())) * self._scale
        if low.dtype != outputs.dtype:
            return outputs + linear(low, self._b()).to(outputs.dtype)
        return torch.addmm(outputs.flatten(0, -2), low.flatten(0, -2), self._b().t()).view_as(outputs)

    def _exchange(self, low: Tensor) -> Tensor:
        """The ``r`` numbers of the tokens that B is to be multiplied with, complete."""
        if self._split == "none":
            return low
        if self._split == "rows":
            if self._sequence_parallel:
                return megatron.gather_from_sequence_parallel_region(low)
            return megatron.copy_to_tensor_model_parallel_region(low)
        if self._sequence_parallel:
            return megatron.reduce_scatter_to_sequence_parallel_region(low)
        return megatron.reduce_from_tensor_model_parallel_region(low)

    def _a(self) -> Tensor:
        """``[n r, inputs]`` of ``n`` parts."""
        return self.parts[0].a if len(self.parts) == 1 else torch.cat([part.a for part in self.parts])

    def _b(self) -> Tensor:
        """``[outputs, n r]``: a row is an output in the layer's order, and has its part's B in that part's columns."""
        rank = len(self.parts[0].a)
        columns, given, stacked, before = rank * len(self.parts), iter(self.parts), [], 0
        for has_part, width in zip(self._has_part, self._widths, strict=True):
            if has_part:
                blocks = next(given).blocks
                stacked += [pad(block, (before, columns - before - rank)) for block in blocks]
                before += rank
            else:
                stacked.append(self.parts[0].a.new_zeros(width, columns))
        whole = stacked[0] if len(stacked) == 1 else torch.cat(stacked)
        return whole if self._order is None else whole[self._order]

    @torch.no_grad()
    def product(self) -> Tensor:
        """``s B A`` as the layer's weight lies on this rank, float32."""
        return (self._b().float() @ self._a().float()).mul_(self._scale)


class GroupedAdapters(torch.nn.Module):
    """The adapters of a layer that multiplies all of a rank's experts at once, as Transformer Engine does.

    Args:
        experts: adapters of each expert, in the layer's order.
    """

    def __init__(self, experts: Sequence[LinearAdapter]) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(experts)

    @property
    def is_on(self) -> bool:
        """Whether they are part of the model."""
        return all(one.is_on for one in self.experts)

    def forward(self, outputs: Tensor, inputs: Tensor, lengths: Sequence[int], *_: Any) -> Tensor:
        """``y + s B A x`` of each expert's tokens.

        Args:
            outputs: ``y [tokens, outputs]`` of the layer, expert after expert.
            inputs: ``x [tokens, inputs]``.
            lengths: tokens of each expert.
        """
        sizes = [int(length) for length in lengths]
        pieces = zip(self.experts, torch.split(outputs, sizes), torch.split(inputs, sizes), strict=True)
        return torch.cat([adapter(y, x) for adapter, y, x in pieces])


class Adapters:
    """The adapters of a rank's model chunks, whose own weights are frozen.

    Attributes:
        parts: adapters of every projection of this rank, in the order of the model.
        scale: ``s``.
        num_experts: experts of a layer of the model; 0: it has none.
    """

    def __init__(self, linears: Mapping[str, LinearAdapter], *, scale: float, num_experts: int) -> None:
        self._linears, self.scale, self.num_experts = dict(linears), scale, num_experts
        self.parts = [part for one in linears.values() for part in one.parts]

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """The model is the frozen one within."""
        for one in self._linears.values():
            one.is_on = False
        try:
            yield
        finally:
            for one in self._linears.values():
                one.is_on = True

    def tensors(self) -> dict[str, Tensor]:
        """This rank's part of A and B by ``<projection>.a`` and ``.b``, where they travel alone."""
        return {
            f"{part.projection.name}.{name}": one.detach()
            for part in self.parts
            for name, one in part.tensors().items()
        }

    def merged(self, weights: Mapping[str, Tensor]) -> "MergedWeights":
        """A rank's weights by name, those with adapters as ``W + s B A``."""
        return MergedWeights(weights, {f"{name}.weight": one for name, one in self._linears.items()})


class MergedWeights(Mapping[str, Tensor]):
    """A view of a rank's weights with the adapters merged in; the weights stay as they are.

    A merged weight is made when it is asked for, in float32, and kept until another one is: the slices of a weight are
    sent one after another.
    """

    def __init__(self, weights: Mapping[str, Tensor], adapters: Mapping[str, LinearAdapter]) -> None:
        self._weights, self._adapters = weights, adapters
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        """The weight as it is to be sent."""
        weight = self._weights[name]
        assert weight.untyped_storage().nbytes(), f"{name} is shared by replicas, and not gathered"
        if name not in self._adapters:
            return weight
        if self._last is None or self._last[0] != name:
            self._last = name, self._adapters[name].product().add_(weight)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._weights)

    def __len__(self) -> int:
        """Number of weights."""
        return len(self._weights)


WholeAdapter = Callable[[Projection], tuple[Tensor, Tensor]]
"""Gives the whole A and B of a projection, float32, on the host."""


def new_adapter(projection: Projection, *, config: AdapterConfig, seed: int) -> tuple[Tensor, Tensor]:
    """A uniform within ``1 / sqrt(inputs)``, as peft draws it, and B 0.

    The numbers depend on the seed and the name only, so that every layout begins with the same ones.
    """
    name = projection.name if projection.expert is None else f"{projection.name} {projection.expert}"
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    largest = projection.columns**-0.5
    a = torch.empty(config.rank, projection.columns).uniform_(-largest, largest, generator=generator)
    return a, torch.zeros(projection.rows, config.rank)


def join_adapters(
    chunks: Sequence[torch.nn.Module],
    arch: Architecture,
    config: AdapterConfig,
    parallel: ParallelConfig,
    *,
    global_rank: int,
    whole: WholeAdapter,
) -> Adapters:
    """Freezes a rank's chunks, which have their weights, and joins adapters to their linear layers.

    Args:
        chunks: the rank's parts of the model, in order.
        arch: architecture of the model.
        config: configuration of the adapters.
        parallel: the layout.
        global_rank: rank of this process.
        whole: gives what they begin with.
    """
    modules = {
        chunk_prefix(number, len(chunks)) + name: module
        for number, chunk in enumerate(chunks)
        for name, module in chunk.named_modules()
    }
    coordinates = shard_coordinates(parallel, global_rank)
    tp, found = coordinates.tensor_parallel, {}
    targets = targets_of(arch, config)
    layers: dict[str, list[LinearAdapter]] = {}
    for adapted in adapted_linears(arch, coordinates, config):
        layer = modules.get(adapted.name)
        name = adapted.name if layer is not None else _grouped(adapted.name)
        weight = next(modules[name].parameters())
        dtype = torch.float32 if config.dtype == "float32" else weight.dtype
        parts: list[LowRank | None] = []
        for projection in adapted.projections:
            if projection.target not in targets:
                parts.append(None)
                continue
            a, b = (one.to(weight.device, dtype) for one in whole(projection))
            parts.append(LowRank(projection, a, b, tp, sequence_parallel=parallel.sequence_parallel))
        found[adapted.name] = LinearAdapter(
            parts,
            widths=[[rows for rows, _ in one.shapes(config.rank, tp.size)[1:]] for one in adapted.projections],
            order=adapted.order(tp if adapted.projections[0].expert is None else TensorParallel(1, 0)),
            scale=config.scale,
            sequence_parallel=parallel.sequence_parallel,
        )
        layers.setdefault(name, []).append(found[adapted.name])
    for chunk in chunks:
        chunk.requires_grad_(False)
        _begin_graph(chunk)
    for name, adapters in layers.items():
        of_layer = adapters[0] if name in found else GroupedAdapters(adapters)
        modules[name].add_module(CHILD, of_layer)
        modules[name].register_forward_hook(_add_adapter)
    return Adapters(found, scale=config.scale, num_experts=0 if arch.experts is None else arch.experts.num_experts)


def _grouped(name: str) -> str:
    """Name of the layer that has all of a rank's experts, where each is no layer of its own."""
    experts, _, layer = name.partition(".local_experts.")
    return f"{experts}.{layer.partition('.')[2]}"


def _add_adapter(layer: torch.nn.Module, inputs: tuple[Any, ...], outputs: Any) -> Any:
    """Megatron's linear layers give outputs and a bias that somebody else adds, torch's the outputs alone."""
    adapter = layer.get_submodule(CHILD)
    assert isinstance(adapter, LinearAdapter | GroupedAdapters)
    if not adapter.is_on:
        return None
    if isinstance(outputs, Tensor):
        return adapter(outputs, *inputs)
    return adapter(outputs[0], *inputs), *outputs[1:]


def _begin_graph(chunk: torch.nn.Module) -> None:
    """Lets hidden states need gradients from a frozen embedding on.

    A layer that is recomputed is an autograd function of its inputs: if none of them needs a gradient, it gets none
    itself, nor do the adapters in it.
    """
    embedding = getattr(chunk, "embedding", None)
    if embedding is not None:
        embedding.register_forward_hook(lambda *called: called[-1].requires_grad_(torch.is_grad_enabled()))
