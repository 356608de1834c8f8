"""Two files about tokens: the load of every expert at the last step, and the largest gaps of a run that was stopped."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
        tokens: per layer, per expert.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class WorstToken:
    """One token.

    Attributes:
        gap_nats: absolute difference of the log-probs.
        sampler_logprob: nats; null in the file if it is not finite.
        trainer_logprob: nats, null likewise.
        token_id: the token.
        token: text of the token.
        before: text before it, of prompt and response.
        after: text after it.
        group_id: number of its prompt's group.
        row: row of its response in the batch.
        position: place in the response, from 0.
        prompt_length: tokens.
        response_length: tokens.
        policy_version: version of the weights that sampled it.
        engine: number of the engine that sampled it.
    """

    gap_nats: float
    sampler_logprob: float
    trainer_logprob: float
    token_id: int
    token: str
    before: str
    after: str
    group_id: int
    row: int
    position: int
    prompt_length: int
    response_length: int
    policy_version: int
    engine: int


def write_worst_tokens(
    run_folder: Path, *, policy_version: int, broken: Sequence[str], looks_like: str, tokens: Sequence[WorstToken]
) -> Path | None:
    """Replaces the file.

    Args:
        run_folder: folder of the run.
        policy_version: version of the weights on both sides.
        broken: figures beyond their limits.
        looks_like: description of where the gaps are.
        tokens: the largest gap first.

    Returns:
        Its path; None, with a warning, if the disk fails: the run has a better reason to stop.
    """
    path = run_folder / WORST_TOKENS_FILE
    content = {
        "policy_version": policy_version,
        "broken": list(broken),
        "looks_like": looks_like,
        "tokens": [_plain(token) for token in tokens],
    }
    try:
        write_file(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        _log.warning("%s was not written: %s", path, error)
        return None
    return path


def _plain(token: WorstToken) -> dict[str, Any]:
    return {key: finite(value) if isinstance(value, float) else value for key, value in asdict(token).items()}
