"""The section of sampled groups: its HTML frame, and the data for the page's script.

To keep the page small, responses are cut to their first tokens and, if needed, fewer groups are shown; a sentence
counts what was left out.
"""

import json
from collections.abc import Sequence
from dataclasses import fields
from itertools import chain
from typing import Any

import numpy as np

from gtpo_megatron.report.run_data import RunData
from gtpo_megatron.report.sampled_groups import MAX_TOKENS, SampledGroup, ShownResponse, shortened

SCALE_QUANTILE = 0.98
"""Quantile of a quantity that is drawn at full colour."""

_SIZES = (
    (64, MAX_TOKENS), (64, 512), (64, 256), (64, 160), (32, 256), (16, 256), (16, 128), (8, 128), (4, 128), (2, 64),
    (1, 32),
)  # fmt: skip
"""(groups per run, tokens per response) in the order in which they are tried."""

_VIEWS = {"entropy": "entropy", "shaped_rewards": "shaped reward", "advantages": "advantage"}
_HEATMAP_CAPTION = (
    "One row per response of the group, correct ones above; the stronger the colour, the more uncertain. Below: how "
    "many correct (d) and incorrect (h) responses reach each position; one without a verdict (?) counts in neither. "
    "GTPO compares a token's entropy with those in its column and of its own outcome."
)


def page_json(data: Any) -> str:
    """JSON that is safe inside a script element, as compact UTF-8."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")


def num_bytes(data: Any) -> int:
    """Bytes of the data on a page."""
    return len(page_json(data).encode("utf-8", "replace"))


def samples(runs: Sequence[RunData], *, max_bytes: int) -> tuple[list[dict[str, Any]], list[str]]:
    """The groups of all runs, cut to the page's budget.

    Args:
        runs: one or several.
        max_bytes: size limit of all groups.

    Returns:
        One mapping of plain values per run, whose ``groups`` may be empty; and sentences about what was left out.
    """
    for num_groups, num_tokens in _SIZES:
        shown = [[_plain(group, num_tokens) for group in _evenly(run.groups, num_groups)] for run in runs]
        if num_bytes(shown) <= max_bytes:
            break
    else:
        shown = [[] for _ in runs]
    remarks = [
        f"{run.name}: {len(groups)} of {len(run.groups)} sampled groups are shown, to keep this page small."
        for run, groups in zip(runs, shown, strict=True)
        if len(groups) < len(run.groups)
    ]
    return [_run(run.name, groups) for run, groups in zip(runs, shown, strict=True)], remarks


def sample_section(runs: Sequence[dict[str, Any]]) -> str:
    """The frame as HTML, or a sentence if no run has sampled texts.

    Args:
        runs: the first result of :func:`samples`.
    """
    heading = '<section class="responses"><h2>Sampled responses</h2>'
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
    return (
        f'{heading}<div class="switch" id="switch" data-kept>'
        '<label class="pick" id="pick-run"><span>Run</span><select></select></label>'
        '<label class="pick" id="pick-group"><span>Group</span><select></select></label>'
        '<span class="choices step"><button type="button" id="previous" aria-label="previous group">&lsaquo;</button>'
        '<button type="button" id="next" aria-label="next group">&rsaquo;</button></span>'
        f'<div class="choices" role="radiogroup" aria-label="Colour tokens by">{views}</div>{scales}</div>'
        '<div id="group" data-kept></div>'
        '<figure class="wide"><h2>Entropy by position and response <small>nats</small></h2>'
        '<div class="plot" id="plot-heatmap" data-kept role="img" aria-label="Entropy by position and response"></div>'
        f'<figcaption>{_HEATMAP_CAPTION}</figcaption><p class="about" id="heatmap-cut"></p></figure></section>'
    )


def _evenly(groups: Sequence[SampledGroup], most: int) -> list[SampledGroup]:
    """At most ``most`` evenly spaced groups, including the last."""
    count = min(most, len(groups))
    return [groups[(index + 1) * len(groups) // count - 1] for index in range(count)]


def _run(name: str, groups: list[dict[str, Any]]) -> dict[str, Any]:
    texts = [each for group in groups for each in group["responses"] if each["tokens"] is not None]
    scales = {view: _scale([each[view] for each in texts]) for view in _VIEWS}
    return {"name": name, "scales": scales, "groups": groups}


def _plain(group: SampledGroup, num_tokens: int) -> dict[str, Any]:
    """Plain values of a group, with lists cut to ``num_tokens``."""
    plain = {name: getattr(group, name) for name in ("step", "group_id", "prompt", "answer")}
    of_response = [each.name for each in fields(ShownResponse)]
    responses = [[getattr(response, name) for name in of_response] for response in group.responses]
    cut = [[value[:num_tokens] if isinstance(value, list) else value for value in values] for values in responses]
    return {**plain, "responses": [dict(zip(of_response, values, strict=True)) for values in cut]}


def _scale(values: Sequence[Sequence[float]]) -> float:
    """The magnitude drawn at full colour; 0 if there are no values."""
    magnitudes = np.sort(np.abs(np.fromiter(chain.from_iterable(values), np.float64)))
    if not len(magnitudes):
        return 0.0
    return shortened(magnitudes[[int(SCALE_QUANTILE * (len(magnitudes) - 1))]])[0]
