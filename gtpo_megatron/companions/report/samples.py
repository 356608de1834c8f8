"""The section of sampled groups: its HTML frame, and the data for the page's script.

To keep the page small, responses are cut to their first tokens and, if needed, fewer groups are shown; a sentence
counts what was left out.
"""

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from gtpo_megatron.companions.report.packed import as_text, unpacked
from gtpo_megatron.companions.report.run_data import RunData
from gtpo_megatron.companions.report.sampled_groups import MAX_TOKENS, SampledGroup, ShownResponse

SCALE_QUANTILE = 0.98
"""Quantile of a quantity that is drawn at full colour."""

_SIZES = (
    (64, MAX_TOKENS), (64, 512), (64, 256), (64, 160), (64, 128), (32, 256), (32, 128),
    (16, 256), (16, 128), (8, 128), (4, 128), (2, 64), (1, 32),
)  # fmt: skip
"""(groups per run, tokens per response) in the order in which they are tried."""
MAX_WORDS = 1 << 16
"""Different tokens of a page: an index has two bytes."""
BYTES = 2
"""Of a packed number."""
_ORDERS = {
    "sampled": "as sampled", "reward": "highest reward", "-reward": "lowest reward", "length": "longest",
    "-length": "shortest", "mean_entropy": "highest entropy", "-mean_entropy": "lowest entropy",
}  # fmt: skip

_VIEWS = {"entropy": "entropy", "shaped_rewards": "shaped reward", "advantages": "advantage"}
_HEATMAP_CAPTION = (
    "One row per response of the group, by its number, correct ones above; the stronger the colour, the more "
    "uncertain. Below: how "
    "many correct (d) and incorrect (h) responses reach each position; one without a verdict (?) counts in neither. "
    "GTPO compares a token's entropy with those in its column and of its own outcome."
)


def page_json(data: Any) -> str:
    """JSON that is safe inside a script element, as compact UTF-8."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")


def num_bytes(data: Any) -> int:
    """Bytes of the data on a page."""
    return len(page_json(data).encode("utf-8", "replace"))


def samples(runs: Sequence[RunData], *, max_bytes: int) -> tuple[dict[str, Any], list[str]]:
    """The groups of all runs, cut to the page's budget.

    Args:
        runs: one or several.
        max_bytes: size limit of all groups.

    Returns:
        ``runs``, one mapping of plain values per run, whose ``groups`` may be empty, and ``words``, the texts of
        tokens, into which responses have indices; and sentences about what was left out.
    """
    for num_groups, num_tokens in _SIZES:
        words: dict[str, int] = {}
        shown = [[_plain(group, num_tokens, words) for group in _evenly(run.groups, num_groups)] for run in runs]
        if len(words) <= MAX_WORDS and num_bytes([shown, list(words)]) <= max_bytes:
            break
    else:
        shown, words = [[] for _ in runs], {}
    remarks = [
        f"{run.name}: {len(groups)} of {len(run.groups)} sampled groups are shown, to keep this page small."
        for run, groups in zip(runs, shown, strict=True)
        if len(groups) < len(run.groups)
    ]
    plain = [_run(run, groups) for run, groups in zip(runs, shown, strict=True)]
    return {"runs": plain, "words": list(words)}, remarks


def sample_section(runs: Sequence[dict[str, Any]]) -> str:
    """The frame as HTML, or a sentence if no run has sampled texts.

    Args:
        runs: those of the first result of :func:`samples`.
    """
    heading = '<section class="responses" id="responses"><h2>Sampled responses</h2>'
    if not any(run["groups"] for run in runs):
        return f'{heading}<p class="missing">No sampled responses were logged.</p></section>'
    views = "".join(
        f'<label><input type="radio" name="view" value="{view}"{" checked" if view == "entropy" else ""}>'
        f"<span>{label}</span></label>"
        for view, label in _VIEWS.items()
    )
    scales = "".join(
        f'<span class="scale scale-{view}"><b class="low"></b><i></i><b class="high"></b></span>' for view in _VIEWS
    )
    orders = "".join(f'<option value="{order}">{label}</option>' for order, label in _ORDERS.items())
    return (
        f'{heading}<div class="switch" id="switch" data-kept>'
        '<label class="pick" id="pick-run"><span>Run</span><select></select></label>'
        '<label class="pick" id="pick-group"><span>Group</span><select></select></label>'
        '<span class="choices step"><button type="button" id="previous" aria-label="previous group">&lsaquo;</button>'
        '<button type="button" id="next" aria-label="next group">&rsaquo;</button></span>'
        f'<div class="choices" role="radiogroup" aria-label="Colour tokens by">{views}</div>{scales}'
        f'<label class="pick" id="pick-order"><span>Order</span><select>{orders}</select></label>'
        '<label class="pick" id="search"><span>Search</span><input type="search" placeholder="text of a prompt or '
        'response"></label>'
        '<span class="choices"><button type="button" id="all" aria-pressed="false"></button></span>'
        '<p class="about" id="found" role="status"></p></div>'
        '<div id="group" data-kept></div>'
        '<figure class="wide"><h2>Entropy by position and response <small>nats</small></h2>'
        '<div class="plot" id="plot-heatmap" data-kept role="img" aria-label="Entropy by position and response"></div>'
        f'<figcaption>{_HEATMAP_CAPTION}</figcaption><p class="about" id="heatmap-cut"></p></figure></section>'
    )


def _evenly(groups: Sequence[SampledGroup], most: int) -> list[SampledGroup]:
    """At most ``most`` evenly spaced groups, including the last."""
    count = min(most, len(groups))
    return [groups[(index + 1) * len(groups) // count - 1] for index in range(count)]


def _run(run: RunData, groups: list[dict[str, Any]]) -> dict[str, Any]:
    responses = [response for group in run.groups for response in group.responses] if groups else []
    scales = {view: _scale([getattr(response, view) for response in responses]) for view in _VIEWS}
    return {"name": run.name, "scales": scales, "groups": groups}


def _plain(group: SampledGroup, num_tokens: int, words: dict[str, int]) -> dict[str, Any]:
    """Plain values of a group, cut to ``num_tokens`` a response; adds the texts of its tokens to ``words``."""
    plain = {name: getattr(group, name) for name in ("step", "group_id", "prompt", "answer")}
    return {**plain, "responses": [_plain_response(response, num_tokens, words) for response in group.responses]}


def _plain_response(response: ShownResponse, num_tokens: int, words: dict[str, int]) -> dict[str, Any]:
    plain = {each.name: getattr(response, each.name) for each in fields(ShownResponse)}
    indices = [words.setdefault(token, len(words)) for token in response.tokens[:num_tokens]]
    foreign = [index for index in response.foreign if index < num_tokens]
    num_own = len(indices) - len(foreign)
    plain |= {view: as_text(getattr(response, view)[: BYTES * num_own]) for view in _VIEWS}
    plain["branches"] = [branch for branch in response.branches if branch.start < num_tokens]
    return plain | {"foreign": foreign, "tokens": as_text(np.asarray(indices, dtype=np.int64).astype("<u2").tobytes())}


def _scale(values: Sequence[bytes]) -> float:
    """The magnitude drawn at full colour; 0 if there are no values."""
    magnitudes = np.sort(np.abs(unpacked(b"".join(values))))
    return float(magnitudes[int(SCALE_QUANTILE * (len(magnitudes) - 1))]) if len(magnitudes) else 0.0
