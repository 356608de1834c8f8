"""Sampled responses with every token coloured by what the algorithm saw of it."""

from collections.abc import Sequence
from html import escape

from gtpo_megatron.observability.rollout_log import RolloutRecord
from gtpo_megatron.observability.run_folder import RunData

MAX_GROUPS = 2
MAX_RESPONSES_OF_A_KIND = 2
"""Correct and incorrect responses shown of each group."""
MAX_TOKENS = 800
"""Shown of one response; the rest is counted. A token takes about 90 bytes of the page."""
DEFAULT_SUCCESS_THRESHOLD = 0.5
SCALE_QUANTILE = 0.98
"""Of a quantity, drawn at full colour: the few largest values would pale all others."""

_VIEWS = (("entropy", "entropy"), ("shaped", "shaped reward"), ("advantage", "advantage"))


def token_view(run: RunData) -> str:
    """The groups of the run's last logged step, as HTML; every text of the model is escaped.

    Returns:
        A section's inside, or a sentence if the run has no sampled texts.
    """
    if not run.rollouts:
        return '<p class="missing">No sampled responses were logged.</p>'
    threshold = run.setting("algorithm.success_threshold", DEFAULT_SUCCESS_THRESHOLD)
    chosen = _choose(run.rollouts, float(threshold))
    shown = [record for _, kinds in chosen for records in kinds for record in records]
    scales = {
        "entropy": _scale([value for record in shown for value in record.token_entropy]),
        "shaped": _scale([value for record in shown for value in record.shaped_rewards]),
        "advantage": _scale([value for record in shown for value in record.advantages]),
    }
    parts = [_switch(run.name, scales)]
    for group, (right, wrong) in chosen:
        parts.append(f'<div class="group"><p class="prompt">{escape(group[0].prompt)}</p><div class="pair">')
        for title, kind in (("correct", right), ("incorrect", wrong)):
            if kind:
                parts.append(
                    f'<div class="{title}">{"".join(_response(record, title, scales) for record in kind)}</div>'
                )
        parts.append("</div></div>")
    return "".join(parts)


def _choose(
    records: Sequence[RolloutRecord], threshold: float
) -> list[tuple[list[RolloutRecord], tuple[list[RolloutRecord], list[RolloutRecord]]]]:
    """The first groups, each with its first correct and incorrect responses; groups with both come first."""
    groups: dict[int, list[RolloutRecord]] = {}
    for record in records:
        groups.setdefault(record.group_id, []).append(record)
    chosen = []
    for group in groups.values():
        right = [record for record in group if record.reward > threshold and not record.reward_failed]
        wrong = [record for record in group if record not in right]
        chosen.append((group, (right[:MAX_RESPONSES_OF_A_KIND], wrong[:MAX_RESPONSES_OF_A_KIND])))
    chosen.sort(key=lambda item: not all(item[1]))
    return chosen[:MAX_GROUPS]


def _scale(values: Sequence[float]) -> float:
    """The magnitude drawn at full colour; 0 where there is nothing to tell apart."""
    magnitudes = sorted(abs(value) for value in values)
    return magnitudes[int(SCALE_QUANTILE * (len(magnitudes) - 1))] if magnitudes else 0.0


def _switch(name: str, scales: dict[str, float]) -> str:
    buttons = "".join(
        f'<label><input type="radio" name="view-{escape(name)}" value="{view}"'
        f"{' checked' if view == 'entropy' else ''}><span>{label}</span></label>"
        for view, label in _VIEWS
    )
    legends = "".join(
        f'<span class="scale scale-{view}">'
        + (f"<b>0</b><i></i><b>{scales[view]:.2g} nats</b>" if view == "entropy" else "")
        + (f"<b>&minus;{scales[view]:.2g}</b><i></i><b>+{scales[view]:.2g}</b>" if view != "entropy" else "")
        + "</span>"
        for view, _ in _VIEWS
    )
    return f'<div class="switch"><div class="choices" role="radiogroup">{buttons}</div>{legends}</div>'


def _response(record: RolloutRecord, title: str, scales: dict[str, float]) -> str:
    length = len(record.tokens)
    facts = [f"{length} tokens"]
    if length:
        facts.append(f"mean entropy {sum(record.token_entropy) / length:.3f} nats")
        facts.append(f"mean advantage {sum(record.advantages) / length:+.3f}")
    if record.truncated:
        facts.append("cut at the length limit")
    verdict = "no verdict" if record.reward_failed else title
    head = f'<p class="facts"><b>{verdict}</b> {escape(" · ".join(facts))}</p>'
    columns = zip(record.tokens, record.token_entropy, record.shaped_rewards, record.advantages, strict=True)
    spans = [_token(*column, scales) for column, _ in zip(columns, range(MAX_TOKENS), strict=False)]
    more = f'<p class="facts">… and {length - MAX_TOKENS:,} more tokens.</p>' if length > MAX_TOKENS else ""
    return f'<div class="response">{head}<p class="tokens">{"".join(spans)}</p>{more}</div>'


def _token(text: str, entropy: float, shaped: float, advantage: float, scales: dict[str, float]) -> str:
    levels = (
        f"--e:{_level(entropy, scales['entropy'])};--s:{_level(shaped, scales['shaped'])};"
        f"--a:{_level(advantage, scales['advantage'])}"
    )
    visible = escape(text).replace("\n", "<u>↵</u>\n") or "<u>∅</u>"
    return f'<span style="{levels}" data-v="{entropy:.3g} {shaped:.3g} {advantage:.3g}">{visible}</span>'


def _level(value: float, scale: float) -> str:
    """Signed share of full colour, in [-1, 1]."""
    return f"{max(-1.0, min(1.0, value / scale)):.2g}" if scale > 0 else "0"
