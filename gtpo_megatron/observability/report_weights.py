"""Where entropy and weight sit in the sampled responses: by position, and by token."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gtpo_megatron.observability.report_traces import Figure, Trace, line
from gtpo_megatron.observability.run_folder import RunData
from gtpo_megatron.observability.sampled_groups import Kind, TokenSums, padded_sum

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
        in_legend = len(runs) > 1  # one entry a run, which switches both its curves
        for kind, color, dash in ((Kind.CORRECT, _GREEN, "dash"), (Kind.INCORRECT, _RED, "dot")):
            positions, means, width = _profile([group.sums[kind] for group in run.groups if kind in group.sums])
            if not positions:
                continue
            widest = max(widest, width)
            if len(runs) == 1:
                traces.append(line(positions, means, name=kind, color=color))
                continue
            traces.append(line(positions, means, name=run.name, color=index, dash=dash))
            traces[-1] |= {
                "showlegend": in_legend,
                "legendgroup": run.name,
                "hovertemplate": f"%{{y:.4~g}} {kind}",
            }
            in_legend = False
    caption = [_PROFILE.caption]
    if len(runs) > 1:
        caption.append("Dashed: correct; dotted: incorrect.")
    if widest > 1:
        caption.append(f"Each point is the mean over up to {widest} positions.")
    return replace(_PROFILE, traces=tuple(traces), caption=" ".join(caption))


def _profile(sums: Sequence[TokenSums]) -> tuple[list[int], list[float], int]:
    """First positions of the bins, counted from 1, their means, and positions a bin."""
    if not sums:
        return [], [], 1
    count_at, entropy_at = padded_sum([each.count_at for each in sums]), padded_sum([each.entropy_at for each in sums])
    width = max(1, -(-len(count_at) // MAX_BINS))
    bins = np.arange(len(count_at)) // width
    count, total = np.bincount(bins, count_at), np.bincount(bins, entropy_at)
    kept = np.flatnonzero(count >= min(MIN_TOKENS, sum(each.num_responses for each in sums)))
    return (kept * width + 1).tolist(), (total[kept] / count[kept]).tolist(), width


def heaviest_tokens(run: RunData, kind: Kind) -> list[dict[str, Any]]:
    """The tokens with the greatest weight in the update, on average over their occurrences.

    The weight of a token is ``|A| / mean |A|``, over the tokens of the sampled responses with the same outcome: 1 is
    average. It says the same of every algorithm; where an algorithm gives all tokens of a response one advantage, only
    differences between responses are left in it.

    Returns:
        ``token``, ``weight``, ``count`` and mean ``entropy``, heaviest first; empty where all advantages are 0.
    """
    weight: dict[str, float] = defaultdict(float)
    entropy: dict[str, float] = defaultdict(float)
    count: dict[str, float] = defaultdict(float)
    for sums in [group.sums[kind] for group in run.groups if kind in group.sums]:
        rows = zip(sums.tokens, sums.weights.tolist(), sums.entropies.tolist(), sums.counts.tolist(), strict=True)
        for token, of_weight, nats, occurrences in rows:
            weight[token] += of_weight
            entropy[token] += nats
            count[token] += occurrences
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
            "count": int(count[token]),
            "entropy": float(f"{entropy[token] / count[token]:.3g}"),
        }
        for token in often[:NUM_HEAVIEST]
    ]
