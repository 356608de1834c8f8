"""Warnings for the reader of several runs: different measurements, or contaminated held-out sets.

A run without the compared setting is left out of a comparison.
"""

from collections.abc import Sequence
from typing import Any

from gtpo_megatron.companions.report.run_data import RunData, measured_sets
from gtpo_megatron.observability.measured_sets import mean_metric, set_name
from gtpo_megatron.run_folder.folder import heldout_name

_SAMPLING = "evaluation.sampling"
_TEMPLATE = "evaluation.prompt_template"
_BEST = ("rollout/reward_best_32_mean", "rollout/reward_best_16_mean")

_Said = list[tuple[str, str]]
"""Name of a run, and its value as text."""


def differences(runs: Sequence[RunData]) -> list[str]:
    """Sentences about settings that differ between the runs; empty if there are none."""
    return [*_of_sets(runs), *_of_evaluation(runs), *_of_best(runs)]


def contaminated(run: RunData) -> list[str]:
    """Sentences about held-out sets with problems that are in the training set."""
    found = [(set_name(label), run.values(f"eval/{label}_contaminated_count")) for label in measured_sets([run])]
    return [
        f"{counts[-1]:g} of the {name} problems are in the training set, too, the same or nearly: accuracy on {name} "
        "says less than it seems to. gtpo-megatron contamination lists them."
        for name, counts in found
        if counts and counts[-1] > 0
    ]


def _of_sets(runs: Sequence[RunData]) -> list[str]:
    """Compares held-out sets by the content of their problems."""
    remarks = []
    for label in measured_sets(runs):
        measuring = [run for run in runs if run.values(mean_metric(label))]
        known = [(run.name, content) for run in measuring if (content := run.contents.get(heldout_name(label)))]
        if len({content.problems_sha256 for _, content in known}) > 1:
            text = _by_value([(name, str(content)) for name, content in known])
            remarks.append(f"The {set_name(label)} problems differ, and the accuracies do not compare: {text}.")
    return remarks


def _of_evaluation(runs: Sequence[RunData]) -> list[str]:
    """Compares settings of the evaluation between runs that share a set."""
    sets = [measured_sets([run]) for run in runs]
    sharing = [
        run
        for run, own in zip(runs, sets, strict=True)
        if any(sum(label in each for each in sets) > 1 for label in own)
    ]
    of_sampling = dict.fromkeys(name for run in sharing for name in _mapping(run.setting(_SAMPLING)))
    settings = [("problems", "evaluation.num_problems"), ("responses a problem", "evaluation.samples")]
    settings += [(name.replace("_", " "), f"{_SAMPLING}.{name}") for name in of_sampling]
    said = []
    for label, path in settings:
        values = [(run.name, run.setting(path)) for run in sharing]
        if text := _by_value([(name, _shown(path, value)) for name, value in values if value is not None]):
            said.append(f"{label} {text}")
    if _by_value([(run.name, str(text)) for run in sharing if (text := run.setting(_TEMPLATE)) is not None]):
        said.append("prompt templates")  # too long to be shown
    return [f"Accuracy was not measured alike; these differ: {'; '.join(said)}."] if said else []


def _of_best(runs: Sequence[RunData]) -> list[str]:
    said = []
    for run in runs:
        prompts, group_size = run.setting("data.prompts_per_step"), run.setting("rollout.group_size")
        if isinstance(prompts, int) and isinstance(group_size, int) and any(run.values(metric) for metric in _BEST):
            said.append((run.name, str(prompts * group_size)))
    text = _by_value(said)
    return [f"The best 32 and 16 responses are out of different numbers of responses a step: {text}."] if text else []


def _by_value(said: _Said) -> str:
    """Values with their runs, such as ``8 (gtpo, grpo), 32 (dapo)``; empty if all are equal."""
    names: dict[str, list[str]] = {}
    for name, text in said:
        names.setdefault(text, []).append(name)
    return ", ".join(f"{text} ({', '.join(of)})" for text, of in names.items()) if len(names) > 1 else ""


def _mapping(value: Any) -> dict[Any, Any]:
    return {str(name): each for name, each in value.items() if name != "kind"} if isinstance(value, dict) else {}


def _shown(path: str, value: Any) -> str:
    if path == "evaluation.num_problems" and value == 0:
        return "all"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if value != [] else "none"
