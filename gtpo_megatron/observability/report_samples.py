"""The sampled groups as the page's script takes them: tokens of some responses, entropies of all, in few bytes.

A page has a budget, so long responses are cut to their first tokens, all alike, and if that is not enough fewer groups
are shown; what is left out is counted and said.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gtpo_megatron.observability.report_weights import heaviest_tokens
from gtpo_megatron.observability.rollout_log import RolloutRecord
from gtpo_megatron.observability.run_folder import RunData, SampledGroup

MAX_RESPONSES_OF_A_KIND = 2
"""Correct and incorrect responses of a group that are shown as text; the heatmap has all of them."""
MAX_PROMPT_CHARACTERS = 4_000
SCALE_QUANTILE = 0.98
"""Of a quantity, drawn at full colour: the few largest values would pale all others."""
SIGNIFICANT_DIGITS = 3

MAX_BYTES = 2_900_000
"""Of all groups of a page; plotly takes 4.8 MB of the page's 8 MiB."""
_BYTES_PER_NUMBER, _BYTES_AROUND_TEXT = 7, 4
_SIZES = (
    (64, 1024),
    (64, 512),
    (64, 256),
    (64, 160),
    (32, 256),
    (16, 256),
    (16, 128),
    (8, 128),
    (4, 128),
    (2, 64),
    (1, 32),
)
"""(groups a run, tokens a response) in the order in which they are tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """What the page shows of sampled responses.

    Attributes:
        runs: plain values, one mapping a run; its ``groups`` may be empty.
        remarks: what was left out.
    """

    runs: list[dict[str, Any]]
    remarks: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """No run has any."""
        return not any(run["groups"] for run in self.runs)


def samples(runs: Sequence[RunData]) -> Samples:
    """The groups of all runs, cut to the page's budget."""
    num_groups, num_tokens = next((size for size in _SIZES if _num_bytes(runs, *size) <= MAX_BYTES), _SIZES[-1])
    shown = [_spread(run.groups, num_groups) for run in runs]
    remarks = []
    for run, groups in zip(runs, shown, strict=True):
        if len(groups) < len(run.groups):
            remarks.append(
                f"{run.name}: {len(groups)} of {len(run.groups)} sampled groups are shown, to keep this page small."
            )
    data = [_run(run, groups, num_tokens) for run, groups in zip(runs, shown, strict=True)]
    return Samples(runs=data, remarks=tuple(remarks))


def _spread(groups: Sequence[SampledGroup], count: int) -> Sequence[SampledGroup]:
    """``count`` groups at most, evenly spaced, the last among them."""
    if len(groups) <= count:
        return groups
    return [groups[(index + 1) * len(groups) // count - 1] for index in range(count)]


def _num_bytes(runs: Sequence[RunData], num_groups: int, num_tokens: int) -> int:
    """An upper estimate of what the groups take on the page."""
    total = 0
    for run in runs:
        for group in _spread(run.groups, num_groups):
            total += sum(_BYTES_PER_NUMBER * min(len(record.tokens), num_tokens) for record in group.records)
            total += min(len(group.records[0].prompt), MAX_PROMPT_CHARACTERS)
            for index in _as_text(run, group):
                tokens = group.records[index].tokens[:num_tokens]
                total += sum(len(token.encode("utf-8", "replace")) for token in tokens)
                total += len(tokens) * (_BYTES_AROUND_TEXT + 2 * _BYTES_PER_NUMBER)
    return total


def _as_text(run: RunData, group: SampledGroup) -> list[int]:
    """Indices of the first correct and the first incorrect responses."""
    right = [index for index, record in enumerate(group.records) if run.is_correct(record)]
    wrong = [index for index in range(len(group.records)) if index not in right]
    return right[:MAX_RESPONSES_OF_A_KIND] + wrong[:MAX_RESPONSES_OF_A_KIND]


def _run(run: RunData, groups: Sequence[SampledGroup], num_tokens: int) -> dict[str, Any]:
    texts = [group.records[index] for group in groups for index in _as_text(run, group)]
    return {
        "name": run.name,
        "scales": {
            "entropy": _scale([value for record in texts for value in record.token_entropy]),
            "shaped": _scale([value for record in texts for value in record.shaped_rewards]),
            "advantage": _scale([value for record in texts for value in record.advantages]),
        },
        "heaviest": {
            "correct": heaviest_tokens(run, is_correct=True),
            "incorrect": heaviest_tokens(run, is_correct=False),
        },
        "groups": [_group(run, group, num_tokens) for group in groups],
    }


def _group(run: RunData, group: SampledGroup, num_tokens: int) -> dict[str, Any]:
    as_text = _as_text(run, group)
    prompt = group.records[0].prompt
    return {
        "step": group.step,
        "id": group.records[0].group_id,
        "prompt": prompt[:MAX_PROMPT_CHARACTERS] + ("…" if len(prompt) > MAX_PROMPT_CHARACTERS else ""),
        "answer": group.records[0].answer[:MAX_PROMPT_CHARACTERS],
        "responses": [
            _response(run, record, num_tokens, is_text=index in as_text) for index, record in enumerate(group.records)
        ],
    }


def _response(run: RunData, record: RolloutRecord, num_tokens: int, *, is_text: bool) -> dict[str, Any]:
    """One response; ``length`` is the whole one's, the lists may be cut."""
    data: dict[str, Any] = {
        "correct": run.is_correct(record),
        "failed": record.reward_failed,
        "truncated": record.truncated,
        "reward": _short(record.reward),
        "length": len(record.tokens),
        "entropy": _shorts(record.token_entropy[:num_tokens]),
    }
    if is_text:
        data |= {
            "tokens": list(record.tokens[:num_tokens]),
            "shaped": _shorts(record.shaped_rewards[:num_tokens]),
            "advantage": _shorts(record.advantages[:num_tokens]),
        }
    return data


def _scale(values: Sequence[float]) -> float:
    """The magnitude drawn at full colour; 0 where there is nothing to tell apart."""
    magnitudes = sorted(abs(value) for value in values)
    return _short(magnitudes[int(SCALE_QUANTILE * (len(magnitudes) - 1))]) if magnitudes else 0.0


def _short(value: float) -> float:
    short = float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    return int(short) if short.is_integer() else short


def _shorts(values: Sequence[float]) -> list[float]:
    return [_short(value) for value in values]
