"""Compares two runs bit for bit and reports the first difference."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.observability.metrics import deterministic
from gtpo_megatron.orchestration.loop.controller import ROLLOUTS_FILE
from gtpo_megatron.run_folder.checkpoints import DRIVER_FILE, CheckpointFolder
from gtpo_megatron.run_folder.metrics_file import METRICS_FILE, read_metrics
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.json_text import read_json
from gtpo_megatron.weights.megatron.checkpoint_files import Verify
from gtpo_megatron.weights.megatron.checkpoint_reader import CheckpointReader
from gtpo_megatron.weights.megatron.restricted_pickle import load_torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The comparison of one part of two runs.

    Attributes:
        part: the compared part.
        compared: its size, for display.
        difference: the first difference, or "".
    """

    part: str
    compared: str
    difference: str

    @property
    def is_equal(self) -> bool:
        """Whether the parts are equal bit for bit."""
        return not self.difference


def compare_runs(left: Path, right: Path, *, verify: Verify = "full") -> Iterator[Comparison]:
    """Compares metrics, exported weights, and all parts of the last checkpoint.

    Args:
        left: folder of a finished run.
        right: folder of another, with the same last step.
        verify: which checks the checkpoints must pass first.

    Raises:
        DataError: a run has no metrics.
        CheckpointError: a checkpoint cannot be read.
    """
    yield _compare_metrics(left / METRICS_FILE, right / METRICS_FILE)
    if (left / "hf").is_dir() or (right / "hf").is_dir():
        yield _compare_exports(left / "hf", right / "hf")
    checkpoints = last_checkpoint(left, verify), last_checkpoint(right, verify)
    yield from compare_checkpoints(*checkpoints, verify=verify)
    if any((checkpoint / ROLLOUTS_FILE).exists() for checkpoint in checkpoints):
        yield compare_sampled_ahead(*(checkpoint / ROLLOUTS_FILE for checkpoint in checkpoints))


def compare_checkpoints(left: Path, right: Path, *, verify: Verify = "full") -> Iterator[Comparison]:
    """Compares tensors one by one, to save memory; then objects and the driver's state."""
    one, other = CheckpointReader(left, verify=verify), CheckpointReader(right, verify=verify)
    kinds: dict[str, Callable[[str], bool]] = {
        "weights": lambda name: not name.startswith("optimizer."),
        "optimizer state": lambda name: name.startswith("optimizer."),
    }
    for part, belongs in kinds.items():
        names = [name for name in one.tensors if belongs(name)]
        difference = _difference_of_names(part, names, [name for name in other.tensors if belongs(name)]) or _first(
            first_difference(one.read([name])[name], other.read([name])[name], name) for name in sorted(names)
        )
        num_values = sum(math.prod(one.tensors[name][0]) for name in names)
        yield Comparison(part=part, compared=f"{len(names)} tensors, {num_values:,} values", difference=difference)
    difference = _difference_of_names("objects", one.objects, other.objects) or _first(
        first_difference(one.read_object(name), other.read_object(name), name) for name in sorted(one.objects)
    )
    yield Comparison(part="random states, other objects", compared=f"{len(one.objects)} objects", difference=difference)
    yield Comparison(
        part="schedule, counters, groups",
        compared="all values",
        difference=first_difference(one.read_common(), other.read_common(), "common"),
    )
    state, other_state = (_driver_state(folder) for folder in (left, right))
    yield Comparison(
        part="sampler and totals",
        compared=f"{len(state)} entries",
        difference=first_difference(state, other_state, "driver"),
    )


def compare_sampled_ahead(left: Path, right: Path) -> Comparison:
    """Compares responses sampled ahead, which checkpoints of runs with ``rollout.max_staleness`` have."""
    states = [load_torch(path) if path.exists() else None for path in (left, right)]
    steps = sorted((states[0] or {"ready": {}})["ready"])
    return Comparison(
        part="responses sampled ahead",
        compared=f"{len(steps)} steps",
        difference=first_difference(states[0], states[1], "rollouts"),
    )


def last_checkpoint(run: Path, verify: Verify) -> Path:
    """The last checkpoint of a run.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    latest = CheckpointFolder(run / "checkpoints").latest(verify)
    if latest is None:
        raise CheckpointError(f"{run} has no checkpoint to compare")
    return latest.path


def _driver_state(folder: Path) -> dict[str, Any]:
    path = folder / DRIVER_FILE
    return Fields(read_json(path, error=CheckpointError), str(path), CheckpointError).raw


def _compare_metrics(left: Path, right: Path) -> Comparison:
    rows, other_rows = ([deterministic(row) for row in read_metrics(path)] for path in (left, right))
    steps, other_steps = ([row["step"] for row in each] for each in (rows, other_rows))
    difference = first_difference(steps, other_steps, "steps") or _first(
        first_difference(one, other, f"step {one['step']}") for one, other in zip(rows, other_rows, strict=True)
    )
    num_values = sum(len(row) - 1 for row in rows)
    return Comparison(part="metrics", compared=f"{len(rows)} rows, {num_values:,} values", difference=difference)


def _compare_exports(left: Path, right: Path) -> Comparison:
    files, other_files = (sorted(path.name for path in folder.glob("*.safetensors")) for folder in (left, right))
    difference = _difference_of_names("exported files", files, other_files)
    num_tensors = 0
    for name in files if not difference else ():
        with safe_open(left / name, framework="pt") as one, safe_open(right / name, framework="pt") as other:
            difference = _difference_of_names(name, list(one.keys()), list(other.keys()))
            for key in one.keys() if not difference else ():
                difference = difference or first_difference(one.get_tensor(key), other.get_tensor(key), key)
                num_tensors += 1
        if difference:
            break
    return Comparison(part="exported model", compared=f"{num_tensors} tensors", difference=difference)


def _difference_of_names(what: str, left: list[str], right: list[str]) -> str:
    only = sorted(set(left) ^ set(right))
    return f"{what}: {only[0]!r} is in one of the runs only ({len(only)} such)" if only else ""


def first_difference(left: Any, right: Any, where: str) -> str:
    """The place of the first difference of two values, with both; "" if they are equal.

    Floats are compared by their bits: NaN equals the same NaN, and 0.0 is not -0.0.
    """
    if type(left) is not type(right):
        return f"{where}: {type(left).__name__} and {type(right).__name__}"
    if isinstance(left, Tensor):
        return _tensor_difference(left, right, where)
    if isinstance(left, np.ndarray):
        return "" if left.tobytes() == right.tobytes() else f"{where}: arrays differ"
    pairs: Iterable[tuple[Any, Any, str]]
    if isinstance(left, Mapping):
        if list(left) != list(right):
            return f"{where}: keys {list(left)} and {list(right)}"
        pairs = ((left[key], right[key], f"{where}.{key}") for key in left)
    elif isinstance(left, list | tuple):
        if len(left) != len(right):
            return f"{where}: {len(left)} and {len(right)} entries"
        pairs = ((one, other, f"{where}[{i}]") for i, (one, other) in enumerate(zip(left, right, strict=True)))
    else:
        return "" if repr(left) == repr(right) else f"{where}: {left!r} and {right!r}"
    return _first(first_difference(one, other, at) for one, other, at in pairs)


def _first(differences: Iterable[str]) -> str:
    """The first non-empty text, or ""."""
    return next(filter(None, differences), "")


def _tensor_difference(left: Tensor, right: Tensor, where: str) -> str:
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return f"{where}: {tuple(left.shape)} {left.dtype} and {tuple(right.shape)} {right.dtype}"
    one, other = (tensor.contiguous().reshape(-1) for tensor in (left, right))
    differs = one.view(torch.uint8) != other.view(torch.uint8)
    if not bool(differs.any()):
        return ""
    index = int(differs.nonzero()[0]) // left.element_size()
    place = tuple(int(i) for i in np.unravel_index(index, left.shape)) if left.ndim else ()
    return f"{where}{list(place)}: {one[index].item()!r} and {other[index].item()!r}"
