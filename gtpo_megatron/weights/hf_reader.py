"""Fills a rank's parameters from a Hugging Face folder, reading only the slices it holds."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gtpo_megatron.errors import ConfigError, WeightMappingError
from gtpo_megatron.weights.hf_buffer import as_matrix
from gtpo_megatron.weights.param_mapping import SliceCopy


def weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it.

    Raises:
        ConfigError: a folder without weights, or an index that names a file that is not there.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        absent = sorted({file for file in names.values() if not (folder / file).exists()})
        if absent:
            raise ConfigError(f"{index} names {', '.join(absent)}, not in the folder; fetch the missing shards")
        return {name: folder / file for name, file in names.items()}
    single = folder / "model.safetensors"
    if not single.exists():
        raise ConfigError(
            f"model.path={folder} has no weights: neither model.safetensors nor model.safetensors.index.json; "
            f"give a folder in Hugging Face format with safetensors"
        )
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except SafetensorError as error:
        raise ConfigError(f"{single} cannot be read: {error}; fetch it again") from error


@torch.no_grad()
def read_parameters(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], plan: Sequence[SliceCopy], parameters: Mapping[str, Tensor]
) -> None:
    """Copies every slice of the plan from disk into its parameter; parameters outside the plan are set to 0 first.

    Args:
        folder: Hugging Face format, safetensors.
        shapes: of every tensor the model needs.
        plan: this rank's copies.
        parameters: name -> this rank's parameter, written in place.

    Raises:
        WeightMappingError: a tensor is missing or has another shape, or a parameter is not in the plan.
    """
    files = weight_files(folder)
    missing = [name for name in shapes if name not in files]
    if missing:
        raise WeightMappingError(f"{folder} lacks {len(missing)} of {len(shapes)} tensors, first {missing[0]!r}")
    unfilled = set(parameters) - {copy.megatron_name for copy in plan}
    if unfilled:
        raise WeightMappingError(f"no name table entry fills {sorted(unfilled)[0]!r} ({len(unfilled)} in all)")
    for parameter in parameters.values():
        parameter.zero_()  # rows that only pad the vocabulary
    for path in sorted({files[copy.hf_name] for copy in plan}):
        with safe_open(path, framework="pt") as file:
            for copy in plan:
                if files[copy.hf_name] == path:
                    found = tuple(file.get_slice(copy.hf_name).get_shape())
                    if found != shapes[copy.hf_name]:
                        raise WeightMappingError(
                            f"{path}: {copy.hf_name} has shape {found}, expected {shapes[copy.hf_name]}"
                        )
                    rows, columns = copy.hf_box.slices
                    view = file.get_slice(copy.hf_name)
                    source = view[rows] if len(found) == 1 else view[rows, columns]
                    target = as_matrix(parameters[copy.megatron_name])[copy.megatron_box.slices]
                    target.copy_(as_matrix(source))
