"""The head of a page: what was run, on which commit, when, on which machines, and what that cost."""

from collections.abc import Sequence
from html import escape

from gtpo_megatron.companions.report.headline import summary
from gtpo_megatron.companions.report.run_data import RunData
from gtpo_megatron.observability.timers import duration

SECONDS_PER_HOUR = 3600.0
_UNKNOWN = "unknown (log.txt does not say)"

_SETTINGS = {
    "model": "model.path", "weights in": "model.dtype", "prompts per step": "data.prompts_per_step",
    "responses per prompt": "rollout.group_size", "response limit": "rollout.sampling.max_response_tokens",
    "temperature": "rollout.sampling.temperature", "updates per rollout": "update.updates_per_rollout",
    "learning rate": "optimizer.learning_rate", "ranks": "parallel.num_ranks",
    "tensor parallel": "parallel.tensor_parallel_size", "pipeline parallel": "parallel.pipeline_parallel_size",
    "seed": "seed",
}  # fmt: skip


def heading(runs: Sequence[RunData], *, dollars_per_gpu_hour: float | None = None) -> str:
    """The head as HTML.

    Args:
        runs: one or several; only settings that all of them share are shown.
        dollars_per_gpu_hour: price of a GPU; None: no cost is shown.
    """
    if len(runs) > 1:
        title = f"{len(runs)} training runs"
        about = ", ".join(f"<b>{escape(run.name)}</b>" for run in runs)
    else:
        title = escape(str(runs[0].setting("name", runs[0].name)))
        about = f"{summary(runs[0])} · run {escape(runs[0].name)}"
    settings = {}
    for label, path in _SETTINGS.items():
        values = {_shown(run, path) for run in runs}
        if len(values) == 1 and (value := values.pop()) is not None:
            settings[label] = value
    origins = "".join(
        (f"<p class='sub of-run'>{escape(run.name)}</p>" if len(runs) > 1 else "")
        + _terms("origin", origin(run, dollars_per_gpu_hour=dollars_per_gpu_hour))
        for run in runs
    )
    return f"<header><h1>{title}</h1><p class='sub'>{about}</p>{origins}{_terms('shared', settings)}</header>"


def origin(run: RunData, *, dollars_per_gpu_hour: float | None = None) -> dict[str, str]:
    """Commit, date, duration, machines and cost of a run, by their labels, as far as its log says them."""
    commits = list(dict.fromkeys(start.commit for start in run.starts if start.commit))
    machines = list(dict.fromkeys(str(start.machines) for start in run.starts if start.machines))
    seconds = sum(start.seconds for start in run.starts)
    facts = {
        "commit": ", ".join(commits) or _UNKNOWN,
        "started": f"{run.starts[0].began:%Y-%m-%d %H:%M}" if run.starts else _UNKNOWN,
        "from start to end": duration(seconds) if run.starts else _UNKNOWN,
        "machines": ", then ".join(machines) or _UNKNOWN,
    }
    if len(run.starts) > 1:
        facts["from start to end"] += f" in {len(run.starts)} starts"
    if dollars_per_gpu_hour is not None:
        facts["cost"] = _cost(run, dollars_per_gpu_hour)
    return facts


def _cost(run: RunData, rate: float) -> str:
    """The cost, and what was multiplied; a start whose machines are not known is not counted, and said so."""
    known = [(start.machines.num_gpus, start.seconds) for start in run.starts if start.machines]
    if not known:
        return "unknown: log.txt does not say on how many GPUs"
    if not any(gpus for gpus, _ in known):
        return "none: no GPU was used"
    hours = [f"{gpus} GPUs x {seconds / SECONDS_PER_HOUR:.2f} h" for gpus, seconds in known]
    total = rate * sum(gpus * seconds for gpus, seconds in known) / SECONDS_PER_HOUR
    product = hours[0] if len(hours) == 1 else f"({' + '.join(hours)})"
    missing = len(run.starts) - len(known)
    rest = f"; {missing} of {len(run.starts)} starts are not counted, on unknown machines" if missing else ""
    price = f"{rate:.2f}" if round(rate, 2) == rate else f"{rate:g}"
    return f"${total:,.2f} = {product} x ${price} a GPU and hour{rest}"


def _terms(kind: str, terms: dict[str, str]) -> str:
    inside = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in terms.items())
    return f"<dl class='settings {kind}'>{inside}</dl>"


def _shown(run: RunData, path: str) -> str | None:
    value = run.setting(path)
    if value is None:
        return None
    if path == "model.path":
        return str(value).rstrip("/").rpartition("/")[2]
    return f"{value:g}" if isinstance(value, float) else str(value)
