"""The sampled groups as the page's script takes them: tokens of some responses, entropies of all, in few bytes.

A page has a budget, so long responses are cut to their first tokens, all alike, and if that is not enough fewer groups
are shown; what is left out is counted and said.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from gtpo_megatron.observability.page_json import num_bytes
from gtpo_megatron.observability.report_weights import heaviest_tokens
from gtpo_megatron.observability.run_folder import RunData
from gtpo_megatron.observability.sampled_groups import MAX_TOKENS, Kind, SampledGroup, SampledResponse, shortened

SCALE_QUANTILE = 0.98
"""Of a quantity, drawn at full colour: the few largest values would pale all others."""

MAX_BYTES = 2_900_000
"""Of all groups of a page; plotly takes 4.8 MB of the page's 8 MiB."""
_SIZES = (
    (64, MAX_TOKENS),
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

_Groups = list[dict[str, Any]]


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


def samples(runs: Sequence[RunData], *, max_bytes: int = MAX_BYTES) -> Samples:
    """The groups of all runs, cut to the page's budget.

    Args:
        runs: one or several.
        max_bytes: what all groups may take on the page.
    """
    fitting = (shown for size in _SIZES if (shown := _cut(runs, *size, max_bytes)) is not None)
    shown = next(fitting, None) or [[] for _ in runs]
    remarks = [
        f"{run.name}: {len(groups)} of {len(run.groups)} sampled groups are shown, to keep this page small."
        for run, groups in zip(runs, shown, strict=True)
        if len(groups) < len(run.groups)
    ]
    return Samples(
        runs=[_run(run, groups) for run, groups in zip(runs, shown, strict=True)],
        remarks=tuple(remarks),
    )


def _cut(runs: Sequence[RunData], num_groups: int, num_tokens: int, max_bytes: int) -> list[_Groups] | None:
    """The groups of each run at one size; None as soon as they turn out to be too big."""
    left = max_bytes
    shown: list[_Groups] = []
    for run in runs:
        shown.append([])
        for group in _spread(run.groups, num_groups):
            data = _group(group, num_tokens)
            left -= num_bytes(data) + 1  # and a comma
            if left < 0:
                return None
            shown[-1].append(data)
    return shown


def _spread(groups: Sequence[SampledGroup], count: int) -> Sequence[SampledGroup]:
    """``count`` groups at most, evenly spaced, the last among them."""
    if len(groups) <= count:
        return groups
    return [groups[(index + 1) * len(groups) // count - 1] for index in range(count)]


def _run(run: RunData, groups: _Groups) -> dict[str, Any]:
    texts = [each for group in groups for each in group["responses"] if "tokens" in each]
    return {
        "name": run.name,
        "scales": {name: _scale([each[name] for each in texts]) for name in ("entropy", "shaped", "advantage")},
        "heaviest": {kind: heaviest_tokens(run, kind) for kind in (Kind.CORRECT, Kind.INCORRECT)},
        "groups": groups,
    }


def _group(group: SampledGroup, num_tokens: int) -> dict[str, Any]:
    return {
        "step": group.step,
        "id": group.group_id,
        "prompt": group.prompt,
        "answer": group.answer,
        "responses": [_response(response, num_tokens) for response in group.responses],
    }


def _response(response: SampledResponse, num_tokens: int) -> dict[str, Any]:
    """One response; ``length`` and the means are of the whole one, the lists may be cut.

    ``tokens`` are everybody's, ``foreign`` says which are not the policy's; all other lists are of the policy's tokens.
    """
    data: dict[str, Any] = {
        "kind": response.kind,
        "truncated": response.truncated,
        "reward": shortened([response.reward])[0],
        "length": response.length,
        "entropy": response.entropy[:num_tokens],
    }
    if response.text is not None:
        data |= {
            "tokens": response.text.tokens[:num_tokens],
            "shaped": response.text.shaped_rewards[:num_tokens],
            "advantage": response.text.advantages[:num_tokens],
            "mean_entropy": round(response.text.mean_entropy, 4),
            "mean_advantage": round(response.text.mean_advantage, 4),
        }
        if response.text.num_tokens > response.length:
            data["total"] = response.text.num_tokens
            data["foreign"] = [index for index in response.text.foreign if index < num_tokens]
    return data


def _scale(values: Sequence[Sequence[float]]) -> float:
    """The magnitude drawn at full colour; 0 where there is nothing to tell apart."""
    magnitudes = np.sort(np.abs(np.fromiter(chain.from_iterable(values), np.float64)))
    if not len(magnitudes):
        return 0.0
    return shortened([magnitudes[int(SCALE_QUANTILE * (len(magnitudes) - 1))]])[0]
