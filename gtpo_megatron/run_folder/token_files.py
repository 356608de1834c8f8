"""Two files about tokens: the load of every expert at the last step, and the largest gaps of a run that was stopped."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.errors import DataError
from gtpo_megatron.run_folder.metrics_file import finite
from gtpo_megatron.untrusted.json_text import read_json
from gtpo_megatron.untrusted.text import printable

EXPERT_LOAD_FILE = "expert_load.json"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLoad:
    """Loads of one step.

    Attributes:
        step: number of the step.
        layers: numbers of the layers that have experts, from 0.
        tokens: tokens of each expert, per layer.
    """

    step: int
    layers: Sequence[int]
    tokens: Sequence[Sequence[int]]


def write_expert_load(run_folder: Path, load: ExpertLoad) -> None:
    """Replaces the file; if the disk fails, with a warning only."""
    content = {"step": load.step, "layers": list(load.layers), "tokens": [list(row) for row in load.tokens]}
    try:
        write_file(run_folder / EXPERT_LOAD_FILE, json.dumps(content) + "\n")
    except OSError as error:
        _log.warning("loads of experts were not written, training goes on: %s", error)


def read_expert_load(run_folder: Path) -> ExpertLoad | None:
    """The file's content; None if there is no file: the model is dense.

    Raises:
        DataError: it cannot be read, or does not hold a table of counts.
    """
    path = run_folder / EXPERT_LOAD_FILE
    if not path.exists():
        return None
    content: Any = read_json(path, error=DataError)
    if not _is_load(content):
        raise DataError(
            f"{printable(path)}: no table of experts' loads; expected step, layers and a row of counts per layer; "
            f"remove the file"
        )
    return ExpertLoad(step=content["step"], layers=content["layers"], tokens=content["tokens"])


def _is_load(content: Any) -> bool:
    if not isinstance(content, dict) or type(content.get("step")) is not int:
        return False
    layers, tokens = content.get("layers"), content.get("tokens")
    if not _are_counts(layers) or not isinstance(tokens, list):
        return False
    return len(tokens) == len(layers) > 0 and (
        all(_are_counts(row) and len(row) == len(tokens[0]) > 0 for row in tokens)
    )


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


WORST_TOKENS_FILE = "worst_tokens.json"


def write_worst_tokens(
    run_folder: Path,
    *,
    policy_version: int,
    broken: Sequence[str],
    looks_like: str,
    tokens: Sequence[Mapping[str, Any]],
) -> Path | None:
    """Replaces the file.

    Args:
        run_folder: folder of the run.
        policy_version: version of the weights on both sides.
        broken: figures beyond their limits.
        looks_like: description of where the gaps are.
        tokens: values of each token by name, the largest gap first; a number that is not finite is null in the file.

    Returns:
        Its path; None, with a warning, if the disk fails: the run has a better reason to stop.
    """
    path = run_folder / WORST_TOKENS_FILE
    content = {
        "policy_version": policy_version,
        "broken": list(broken),
        "looks_like": looks_like,
        "tokens": [
            {key: finite(value) if isinstance(value, float) else value for key, value in token.items()}
            for token in tokens
        ],
    }
    try:
        write_file(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        _log.warning("%s was not written: %s", path, error)
        return None
    return path
