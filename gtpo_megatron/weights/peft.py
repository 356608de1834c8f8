"""Folders of adapters in peft's format: ``adapter_config.json`` and ``adapter_model.safetensors``."""

import json
import logging
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.json_text import read_json
from gtpo_megatron.untrusted.text import check_file, printable, shown
from gtpo_megatron.weights.adapter_shapes import targets_of
from gtpo_megatron.weights.adapters import (
    Projection,
    chosen_projections,
    module_names,
    projections,
    tensor_names,
    tensor_shapes,
)
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.hf.reader import ADAPTER_CONFIG_FILE, DTYPES, check_names, require_finite

logger = logging.getLogger(__name__)

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_ADAPTER = re.compile(r".*\.layers\.\d+\..*?(\w+)\.lora_[AB]\.weight")
_EXPERTS = re.compile(r".*\.layers\.\d+\.mlp\.experts\.(base_layer\.)?lora_[AB]\.weight")

_HARMLESS = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_core", "peft_type", "peft_version"),
        *("revision", "task_type", "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules"),
        "target_parameters",  # the tensors say which
        *("layers_to_transform", "layers_pattern"),  # the tensors say which layers
        "lora_dropout",  # of the training that made them
        "qalora_group_size",  # of no effect without use_qalora
        "eva_config",  # how A began
    }
)
"""Keys of peft's that leave a projection ``W x + s B A x``; any other one must be off."""
_OFF = {"bias": ("none",), "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva")}
"""Values besides null, false and empty ones with which a key is off. Other ways to begin also change W."""


class PeftFolder:
    """Adapters in a folder, of which a run begins.

    Args:
        folder: in peft's format.
        arch: architecture of the model that they belong to.
        config: configuration of the run.

    Raises:
        ConfigError: the folder cannot be read, or its adapters are other ones than the configuration says.
        WeightMappingError: it lacks adapters, or has others.
    """

    def __init__(self, folder: Path, arch: Architecture, config: AdapterConfig) -> None:
        said = _checked_config(folder / ADAPTER_CONFIG_FILE, config)
        self._path = folder / WEIGHTS_FILE
        self._file = _open(self._path)
        self._projections, self._targets = chosen_projections(arch, config), targets_of(arch, config)
        self._num_experts = 0 if arch.experts is None else arch.experts.num_experts
        self._takes_turns = arch.experts is not None and arch.experts.stacks_in_turns
        self._last: tuple[str, Tensor] | None = None
        found = set(self._file.keys())
        shapes = tensor_shapes(arch, config)
        _check_targets(found, said, arch, config, self._path)
        self._absent = {layer for layer in map(_layer, shapes) if layer not in set(map(_layer, found))}
        if not found:
            raise ConfigError(f"{self._path} holds no adapters; save them again, with peft's save_pretrained")
        if not _may_lack_layers(said):
            self._absent = set()  # they lack, whatever is not there
        shapes = {name: shape for name, shape in shapes.items() if _layer(name) not in self._absent}
        check_names(found, shapes.keys(), where=str(self._path))
        if self._absent:
            logger.warning(
                "%s has no adapters of %d of %d layers, where they begin as new ones do: without effect",
                self._path,
                len(self._absent),
                arch.num_layers,
            )
        for name, shape in shapes.items():
            self._check(name, shape)

    def _check(self, name: str, shape: tuple[int, int]) -> None:
        entry = self._file.get_slice(name)
        found = tuple(entry.get_shape())
        if found != shape or entry.get_dtype() not in DTYPES:
            raise ConfigError(
                f"{self._path}: {printable(name)} has shape {found} of {printable(entry.get_dtype())}, expected "
                f"{shape} of {', '.join(DTYPES)}: the adapters are of another model or rank"
            )

    def has(self, projection: Projection) -> bool:
        """Whether its layer has adapters here; the folder may be of some layers only."""
        return _layer(projection.name) not in self._absent

    def check_values(self) -> None:
        """Reads all of them.

        Raises:
            ConfigError: as :meth:`read`.
        """
        for projection in filter(self.has, self._projections):
            self.read(projection)

    def read(self, projection: Projection) -> tuple[Tensor, Tensor]:
        """The whole A and B, float32.

        Raises:
            ConfigError: they hold NaN or infinity.
        """
        a, b = (self._tensor(name).float() for name in tensor_names(projection, self._targets))
        if projection.expert is not None:
            a = a.view(self._num_experts, -1, projection.columns)[projection.expert]
            b = b.view(projection.rows, -1, self._num_experts)[..., projection.expert]
            if self._takes_turns:
                count = len(projection.blocks)
                b = torch.cat([b[number::count] for number in range(count)])
        for one in (a, b):
            require_finite([one], projection.name, where=self._path)
        return a, b

    def _tensor(self, name: str) -> Tensor:
        """One of the file; the last one is kept, which may be that of all experts."""
        if self._last is None or self._last[0] != name:
            self._last = name, self._file.get_tensor(name)
        return self._last[1]


def _may_lack_layers(said: Fields) -> bool:
    """Whether adapters are of some layers: by their numbers, by a pattern, or with exceptions."""
    is_by_pattern = isinstance(said.raw.get("target_modules"), str)
    return said.has("layers_to_transform") or is_by_pattern or bool(said.raw.get("exclude_modules"))


def _layer(name: str) -> str:
    """The number of the layer in a tensor's name; empty if it is in none."""
    found = _LAYER.search(name)
    return found[1] if found else ""


def _check_targets(found: Collection[str], said: Fields, arch: Architecture, config: AdapterConfig, path: Path) -> None:
    """Raises ConfigError unless the adapters are of the configuration's targets, and of nothing else."""
    of_experts = {name for name in found if _EXPERTS.fullmatch(name)}
    known = {name: _ADAPTER.fullmatch(name) for name in found if name not in of_experts}
    if strange := sorted(name for name, match in known.items() if match is None):
        raise ConfigError(
            f"{path}: {shown(strange[0])} is no adapter of a projection in a layer as peft's save_pretrained names it; "
            f"merge the adapters into the model (peft's merge_and_unload) and train that"
        )
    targets = {match[1] for match in known.values() if match is not None}
    if of_experts:
        # by the ends of their names: "gate_up_proj" and "mlp.experts.gate_up_proj" are the same to peft
        named = (one.rpartition(".")[2] for one in said.get("target_parameters", list[str], []))
        targets |= {f"experts.{name}" for name in named}
    every = dict.fromkeys(one.target for one in projections(arch))
    if unknown := sorted(targets - every.keys()):
        raise ConfigError(
            f"{path} has adapters of {', '.join(map(printable, unknown))}, of which none are trained here; merge the "
            f"adapters into the model (peft's merge_and_unload) and train that"
        )
    if targets and targets != set(targets_of(arch, config)):
        raise ConfigError(
            f"adapter.targets={config.targets!r}, but the adapters of {path} are of others; set "
            f"--adapter.targets {' '.join(name for name in every if name in targets)}"
        )


def _open(path: Path) -> Any:
    pickled = path.with_name(PICKLED_FILE)
    if not path.exists() and pickled.exists():
        raise ConfigError(
            f"{path.parent} has {PICKLED_FILE}, which is not read: loading it could run code; load the adapters with "
            f"peft and save_pretrained them again, which writes {WEIGHTS_FILE}"
        )
    check_file(path, error=ConfigError)  # of a file that it may not read safetensors says that it is not there
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {printable(error)}; save the adapters again") from error


def _checked_config(path: Path, config: AdapterConfig) -> Fields:
    """What a folder says of its adapters; raises ConfigError unless a run's configuration describes the same."""
    fields = Fields(read_json(path, error=ConfigError), str(path), ConfigError)
    if (kind := fields.raw.get("peft_type")) != "LORA":
        raise ConfigError(f"{path}: peft_type is {shown(kind)}, expected LORA")
    for name, value in fields.raw.items():
        if value and name not in _HARMLESS and value not in _OFF.get(name, ()):
            raise ConfigError(f"{path}: {shown(name)} is {shown(value)}, which adapters here do not have")
    rank, alpha = fields.get("r", int, at_least=1), fields.get("lora_alpha", float)
    if rank != config.rank:
        raise ConfigError(
            f"adapter.rank={config.rank}, but the adapters of {path} have r={rank}; set --adapter.rank {rank}"
        )
    scale = alpha / (math.sqrt(rank) if fields.get("use_rslora", bool, False) else rank)
    if scale <= 0:
        raise ConfigError(f"{path}: lora_alpha is {alpha:g}, expected more than 0")
    if not math.isclose(scale, config.scale, rel_tol=1e-6):
        raise ConfigError(
            f"adapter.alpha={config.alpha:g} with rank={rank} and scaling={config.scaling!r} multiplies adapters by "
            f"{config.scale:g}, those of {path} are made for {scale:g}; set --adapter.alpha {scale * rank:g} "
            f"--adapter.scaling rank"
        )
    return fields


def write_peft_folder(
    target: Path,
    adapters: Mapping[str, tuple[Tensor, Tensor]],
    *,
    base: str,
    scale: float,
    takes_turns: bool = False,
) -> None:
    """Writes adapters into an existing folder, float32.

    Args:
        target: the folder.
        adapters: whole A and B by the name of their projection; those of experts are stacked, ``[experts, r, columns]``
            and ``[experts, rows, r]``.
        base: the model that they belong to, for whoever loads them.
        scale: ``s``.
        takes_turns: the model's folder has the rows of experts' gates and up projections in turns.
    """
    names = {name: _target(name) for name in adapters}
    rank = next(iter(adapters.values()))[0].shape[-2]
    linear = sorted({target for target in names.values() if not target.startswith("experts.")})
    stacked = [target for target in ("experts.gate_up_proj", "experts.down_proj") if target in names.values()]
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": scale * rank,
        "use_rslora": False,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": linear,
    }
    if stacked:
        said["target_parameters"] = [f"mlp.{target}" for target in stacked]
    write_file(target / ADAPTER_CONFIG_FILE, json.dumps(said, indent=2) + "\n")
    tensors: dict[str, Tensor] = {}
    for name, pair in adapters.items():
        one = names[name]
        whole = _of_all_experts(*pair, takes_turns and one == "experts.gate_up_proj") if one in stacked else pair
        floats = (part.float().contiguous() for part in whole)
        tensors |= zip(module_names(name, one, stacked), floats, strict=True)
    save_file(tensors, target / WEIGHTS_FILE, metadata={"format": "pt"})


def _target(name: str) -> str:
    """The target that a projection is, by its name."""
    return ".".join(name.split(".")[-2 if ".experts." in name else -1 :])


def _of_all_experts(a: Tensor, b: Tensor, takes_turns: bool) -> tuple[Tensor, Tensor]:
    """``[r experts, columns]`` and ``[rows, r experts]``; where gates and up projections take turns, so do B's rows."""
    rows = b.permute(1, 2, 0)
    return a.flatten(0, 1), (torch.stack(rows.chunk(2), 1).flatten(0, 1) if takes_turns else rows).flatten(1)
