"""Adapters in a checkpoint of a run: read whole, and merged into the weights that they were trained over."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.text import printable
from gtpo_megatron.weights.adapters import Projection, projections
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.hf.reader import DTYPES, WeightFolder, is_finite, weight_files
from gtpo_megatron.weights.megatron.checkpoint_files import MEGATRON_FOLDER, file_checksum, is_checkpoint
from gtpo_megatron.weights.megatron.checkpoint_reader import load_common, load_whole
from gtpo_megatron.weights.megatron.reader import MegatronCheckpoint
from gtpo_megatron.weights.megatron.restricted_pickle import load_index
from gtpo_megatron.weights.param_mapping import Box, as_matrix

ADAPTERS, SCALE = "adapters", "scale"
"""Where the common state of a checkpoint says what multiplies its adapters."""
ADAPTERS_PREFIX = f"{ADAPTERS}."
"""Begins the keys of their tensors: ``adapters.model.layers.3.self_attn.q_proj.a``."""


@dataclass(frozen=True, slots=True)
class StoredAdapters:
    """The adapters of a checkpoint.

    Attributes:
        pairs: A and B by the name of their projection; those of experts are stacked, ``[experts, r, columns]`` and
            ``[experts, rows, r]``.
        scale: ``s``.
        files: checksum by name of the files with the weights that they were trained over.
        places: projection that a tensor of the name tables belongs to, and its first row there.
    """

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    scale: float
    files: Mapping[str, str]
    places: Mapping[str, tuple[Projection, int]]

    def check_frozen(self, model: Path) -> None:
        """Raises CheckpointError unless a model folder has the weights that the adapters were trained over."""
        found = {path.name: file_checksum(path) for path in frozen_files(model)}
        for name in sorted(self.files.keys() | found.keys()):
            if self.files.get(name) != found.get(name):
                raise CheckpointError(
                    f"{model}: {printable(name)} has checksum {found.get(name)}, expected "
                    f"{printable(self.files.get(name))}: the adapters were trained over other weights; name their "
                    f"folder with --model, or take these with --no-verify"
                )

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """``W + s B A`` in the dtype of W, the sum in float32; W itself if it has no adapter.

        Args:
            name: name of a tensor of the model's folder.
            weight: W, whole.
        """
        if name not in self.places:
            return weight
        projection, first = self.places[name]
        if projection.name not in self.pairs:
            return weight
        a, b = self.pairs[projection.name]
        if projection.expert is not None:
            a, b = a[projection.expert], b[projection.expert]
        rows = b[first : first + len(weight)].float()
        return (weight.float() + self.scale * (rows @ a.float())).to(weight.dtype)


def stored_adapters(checkpoint: Path, arch: Architecture) -> StoredAdapters | None:
    """The adapters of a checkpoint of a run; None if it has the model's weights. Its files must have been verified.

    Raises:
        CheckpointError: they cannot be read, or are not of this model.
    """
    index = load_index(checkpoint)
    shapes = {
        key: tuple(entry.size)
        for key, entry in index.state_dict_metadata.items()
        if key.startswith(ADAPTERS_PREFIX) and isinstance(entry, TensorStorageMetadata)
    }
    if not shapes:
        return None
    every = projections(arch)
    known = {one.name: one for one in every}
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name in sorted({key.removeprefix(ADAPTERS_PREFIX).rpartition(".")[0] for key in shapes}):
        keys = {end: f"{ADAPTERS_PREFIX}{name}.{end}" for end in _ends(known.get(name))}
        said = [shapes.get(key, ()) for key in keys.values()]
        if name not in known or not _fits(known[name], said, arch):
            raise CheckpointError(
                f"checkpoint {checkpoint}: the adapter of {printable(name)} has shapes {', '.join(map(str, said))}: it "
                f"is of another model"
            )
        a, *blocks = (load_whole(checkpoint, index, key) for key in keys.values())
        found[name] = a, blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-2)
        for tensor in found[name]:
            if tensor.dtype not in DTYPES.values() or not is_finite(tensor):
                raise CheckpointError(
                    f"checkpoint {checkpoint}: the adapter of {name} is of {tensor.dtype}, or holds NaN or infinity"
                )
    common = Fields(load_common(checkpoint, index), f"checkpoint {checkpoint}", CheckpointError)
    scale = common.fields(ADAPTERS).get(SCALE, float, at_least=0.0)
    files = file_checksums(common.raw.get("reference"), checkpoint)
    return StoredAdapters(found, scale, files, _places(every))


def _places(every: Iterable[Projection]) -> dict[str, tuple[Projection, int]]:
    """By tensor of the name tables its projection, and its first row there; one of several blocks begins at 0."""
    found: dict[str, tuple[Projection, int]] = {}
    for one in every:
        row = 0
        for block in one.blocks:
            found.setdefault(block.tensor, (one, row))
            row += block.rows
    return found


def _ends(projection: Projection | None) -> list[str]:
    """Ends of the names of a projection's tensors, as ``LowRank.tensors`` has them."""
    num_blocks = 1 if projection is None else len(projection.blocks)
    return ["a", *(["b"] if num_blocks == 1 else [f"b{number}" for number in range(num_blocks)])]


def _fits(projection: Projection, shapes: Sequence[tuple[int, ...]], arch: Architecture) -> bool:
    """Whether tensors of these shapes are a projection's A and blocks of B, of some rank."""
    stack: tuple[int, ...] = ()
    if projection.expert is not None and arch.experts is not None:
        stack = (arch.experts.num_experts,)
    rank = shapes[0][len(stack)] if len(shapes[0]) == len(stack) + 2 else 0
    expected = [(*stack, *shape) for shape in projection.shapes(rank, 1)]
    return 1 <= rank <= max(projection.rows, projection.columns) and list(shapes) == expected


def file_checksums(reference: object, checkpoint: Path) -> dict[str, str]:
    """Checksum by name of the files that a checkpoint names in its common state.

    Raises:
        CheckpointError: it names none, or they are no texts.
    """
    where = f"checkpoint {checkpoint}: reference"
    found = Fields(reference, where, CheckpointError).get("files", dict)
    if not all(isinstance(text, str) for pair in found.items() for text in pair):
        raise CheckpointError(f"{where}: files are no texts")
    return found


class MergedModel:
    """A model folder's tensors with adapters merged in; a reader like :class:`MegatronCheckpoint`.

    Args:
        source: reads the folder, of either kind.
        adapters: adapters of a checkpoint.

    Attributes:
        dtypes: dtype of every tensor, by name.
    """

    def __init__(self, source: WeightFolder | MegatronCheckpoint, adapters: StoredAdapters) -> None:
        self._source, self._adapters = source, adapters
        if isinstance(source, MegatronCheckpoint):
            self.dtypes = source.dtypes
        else:
            self.dtypes = {name: stored.dtype for name, stored in source.tensors.items()}

    def read(
        self, names: Iterable[str], shapes: Mapping[str, tuple[int, ...]], advance: Callable[[int], None]
    ) -> dict[str, Tensor]:
        """Reads tensors completely, adapters merged in; see :meth:`MegatronCheckpoint.read`."""
        names = list(names)
        if isinstance(self._source, MegatronCheckpoint):
            found = self._source.read(names, shapes, advance)
        else:
            found = {}
            for name in names:
                rows, columns = as_matrix(torch.empty(shapes[name], device="meta")).shape
                found[name] = self._source.read(name, Box(0, rows, 0, columns)).reshape(shapes[name])
                advance(found[name].nbytes)
        return {name: self._adapters.merge(name, tensor) for name, tensor in found.items()}


def frozen_files(model: Path) -> list[Path]:
    """The files with a model folder's weights, of either kind."""
    converted = model / MEGATRON_FOLDER
    return sorted(converted.glob("*.distcp")) if is_checkpoint(converted) else sorted(weight_files(model))
