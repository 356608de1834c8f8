"""Where entropy and weight sit in the sampled responses: by position, and by token."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gtpo_megatron.observability.report_traces import Figure, Trace, line
from gtpo_megatron.observability.run_folder import RunData

MAX_BINS = 80
"""Of positions; a curve of more points says no more."""
MIN_TOKENS = 10
"""In a bin of positions; the mean of fewer is noise."""
MIN_OCCURRENCES = 5
"""Of a token among the heaviest; the mean of fewer is noise."""
NUM_HEAVIEST = 12

_GREEN, _RED = 2, 5

_PROFILE = Figure(
    key="profile",
    title="Entropy along a response",
    unit="nats a token",
    caption="Mean entropy of the tokens at each position, of the sampled responses shown below.",
    missing="No sampled responses were logged.",
    layout={"xaxis": {"title": {"text": "position", "standoff": 4}}, "yaxis": {"rangemode": "tozero"}},
)


def entropy_profiles(runs: Sequence[RunData]) -> Figure:
    """Mean entropy by position, of correct and of incorrect responses."""
    traces: list[Trace] = []
    widest = 1
    for index, run in enumerate(runs):
        records = [record for group in run.groups for record in group.records]
        in_legend = len(runs) > 1  # one entry a run, which switches both its curves
        for label, color, dash in (("correct", _GREEN, "dash"), ("incorrect", _RED, "dot")):
            entropies = [
                np.asarray(record.token_entropy, dtype=np.float64)
                for record in records
                if run.is_correct(record) == (label == "correct") and record.tokens and not record.reward_failed
            ]
            positions, means, width = _profile(entropies)
            if not positions:
                continue
            widest = max(widest, width)
            if len(runs) == 1:
                traces.append(line(positions, means, name=label, color=color))
                continue
            traces.append(line(positions, means, name=run.name, color=index, dash=dash))
            traces[-1] |= {
                "showlegend": in_legend,
                "legendgroup": run.name,
                "hovertemplate": f"%{{y:.4~g}} {label}",
            }
            in_legend = False
    caption = [_PROFILE.caption]
    if len(runs) > 1:
        caption.append("Dashed: correct; dotted: incorrect.")
    if widest > 1:
        caption.append(f"Each point is the mean over up to {widest} positions.")
    return replace(_PROFILE, traces=tuple(traces), caption=" ".join(caption))


def _profile(entropies: Sequence[np.ndarray[Any, np.dtype[np.float64]]]) -> tuple[list[int], list[float], int]:
    """First positions of the bins, counted from 1, their means, and positions a bin."""
    if not entropies:
        return [], [], 1
    width = max(1, -(-max(len(values) for values in entropies) // MAX_BINS))
    bins = np.concatenate([np.arange(len(values)) // width for values in entropies])
    count = np.bincount(bins)
    total = np.bincount(bins, weights=np.concatenate(entropies))
    kept = np.flatnonzero(count >= min(MIN_TOKENS, len(entropies)))
    return (kept * width + 1).tolist(), (total[kept] / count[kept]).tolist(), width


def heaviest_tokens(run: RunData, *, is_correct: bool) -> list[dict[str, Any]]:
    """The tokens with the greatest weight in the update, on average over their occurrences.

    The weight of a token is ``|A| / mean |A|``, over the tokens of the sampled responses with the same outcome: 1 is
    average. It says the same of every algorithm; where an algorithm gives all tokens of a response one advantage, only
    differences between responses are left in it.

    Returns:
        ``token``, ``weight``, ``count`` and mean ``entropy``, heaviest first; empty where all advantages are 0.
    """
    weight: dict[str, float] = defaultdict(float)
    entropy: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for group in run.groups:
        for record in group.records:
            if run.is_correct(record) != is_correct or record.reward_failed:
                continue
            for token, advantage, nats in zip(record.tokens, record.advantages, record.token_entropy, strict=True):
                weight[token] += abs(advantage)
                entropy[token] += nats
                count[token] += 1
    total = sum(weight.values())
    if total == 0:
        return []
    mean = total / sum(count.values())
    often = [token for token in count if count[token] >= MIN_OCCURRENCES]
    often.sort(key=lambda token: (-weight[token] / count[token], token))
    return [
        {
            "token": token,
            "weight": round(weight[token] / count[token] / mean, 3),
            "count": count[token],
            "entropy": float(f"{entropy[token] / count[token]:.3g}"),
        }
        for token in often[:NUM_HEAVIEST]
    ]
