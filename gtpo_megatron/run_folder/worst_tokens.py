"""``worst_tokens.json``: the tokens on which sampler and trainer differed most when the run was stopped for it."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.run_folder.finite import finite

WORST_TOKENS_FILE = "worst_tokens.json"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorstToken:
    """One token.

    Attributes:
        gap_nats: absolute difference of the log-probs.
        sampler_logprob: nats; null in the file if it is not finite.
        trainer_logprob: likewise.
        token_id: the token.
        token: as text.
        before: text before it, of prompt and response.
        after: text after it.
        group_id: of its prompt.
        row: of its response in the batch.
        position: in the response, from 0.
        prompt_length: tokens.
        response_length: tokens.
        policy_version: of the weights that sampled it.
        engine: that sampled it.
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
        run_folder: of the run.
        policy_version: on both sides.
        broken: figures beyond their limits.
        looks_like: where the gaps are.
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
