"""Which held-out sets were measured, in the order in which a reader is told of them."""

import re
from collections.abc import Iterable, Sequence

from gtpo_megatron.config.dataset import DatasetRef, parse_dataset
from gtpo_megatron.config.evaluation import HELDOUT
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.observability.run_folder import RunData

_MEAN = re.compile(r"eval/([a-z0-9_]+)_mean_at_k")


def mean_metric(label: str) -> str:
    """Name of a set's mean@k."""
    return f"eval/{label}_mean_at_k"


def set_name(label: str) -> str:
    """What a reader calls a set: ``held-out`` is the run's own, benchmarks go by their labels."""
    return "held-out" if label == HELDOUT else label


def labels_among(metrics: Iterable[str]) -> list[str]:
    """Labels of the sets whose mean@k is among metric names: the run's own first, the others as they come."""
    labels = dict.fromkeys(match.group(1) for name in metrics if (match := _MEAN.fullmatch(name)))
    return [HELDOUT] * (HELDOUT in labels) + [label for label in labels if label != HELDOUT]


def configured_sets(run: RunData) -> dict[str, DatasetRef]:
    """The sets that ``config.yaml`` names, by label; what an older version wrote otherwise is left out."""
    benchmarks = run.setting("evaluation.benchmarks")
    texts = [("", text) for text in benchmarks] if isinstance(benchmarks, list) else []
    refs: dict[str, DatasetRef] = {}
    for label, text in [(HELDOUT, run.setting("evaluation.path")), *texts]:
        if isinstance(text, str) and text.strip():
            try:
                ref = parse_dataset(text, "evaluation")
            except ConfigError:
                continue  # not a name of today's; its metrics are shown all the same, after the others
            refs[label or ref.label] = ref
    return refs


def measured_sets(runs: Sequence[RunData]) -> list[str]:
    """Labels of the sets that any of the runs was measured on: in the order of the configuration, then as found."""
    in_order = [mean_metric(label) for run in runs for label in configured_sets(run)]
    found = dict.fromkeys(name for run in runs for row in run.metrics for name in row)
    labels = labels_among([*in_order, *found])
    return [label for label in labels if any(run.values(mean_metric(label)) for run in runs)]


def benchmark_means(run: RunData, labels: Sequence[str]) -> tuple[int, list[float]]:
    """The plain mean of mean@k over benchmarks, at the steps that measured all of them.

    Args:
        run: whose metrics are read.
        labels: of the sets that it was measured on; its own held-out set is no benchmark.

    Returns:
        How many benchmarks, and their means by ascending step; none where there are fewer than two benchmarks.
    """
    series = [dict(zip(*run.series(mean_metric(label)), strict=True)) for label in labels if label != HELDOUT]
    if len(series) < 2:
        return len(series), []
    steps = sorted(set.intersection(*(set(each) for each in series)))
    return len(series), [sum(each[step] for each in series) / len(series) for step in steps]
