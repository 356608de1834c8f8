"""Reads a run folder for a report; missing or unreadable files become remarks.

A run may be running or crashed, so the configuration is read as plain values, and a cut last line is ignored.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gtpo_megatron.companions.report.sampled_groups import SampledGroup, read_groups
from gtpo_megatron.errors import DataError
from gtpo_megatron.observability.measured_sets import labels_among, mean_metric
from gtpo_megatron.run_folder.folder import DataContent, read_contents
from gtpo_megatron.run_folder.metrics_file import METRICS_FILE, finite, read_what_there_is
from gtpo_megatron.run_folder.provenance import LOG_FILE, RunStart, logged_starts
from gtpo_megatron.run_folder.token_files import ExpertLoad, read_expert_load
from gtpo_megatron.untrusted.text import printable, read_text, reason
from gtpo_megatron.untrusted.yaml_text import MAX_YAML_BYTES, parse_yaml

CONFIG_FILE = "config.yaml"
DEFAULT_SUCCESS_THRESHOLD = 0.5
"""Used if the configuration cannot be read."""
_TIMED = ("step", "push_check", "evaluation", "checkpoint")
"""What the driver does one after another."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The data of one run for a report.

    Attributes:
        name: unique among the runs of the report.
        config: plain values of ``config.yaml``; empty if it cannot be read.
        config_text: the text of ``config.yaml``.
        metrics: one mapping per step, see ``metrics_file.read_metrics``.
        groups: sampled groups by ascending step.
        remarks: sentences about what could not be read.
        contents: its data sets, by their names in ``data.json``.
        expert_load: tokens per expert at the last step that was written down; None for a dense model.
        starts: its starts, as the log has them.
    """

    name: str
    config: dict[str, Any]
    config_text: str
    metrics: list[dict[str, Any]]
    groups: tuple[SampledGroup, ...]
    remarks: tuple[str, ...]
    contents: dict[str, DataContent] = field(default_factory=dict)
    expert_load: ExpertLoad | None = None
    starts: tuple[RunStart, ...] = ()

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric, without steps at which it is absent or not finite."""
        steps, values = self.columns.get(metric, ((), ()))
        return list(steps), list(values)

    @cached_property
    def columns(self) -> dict[str, tuple[list[int], list[float]]]:
        """Every :meth:`series` that is not empty; a page asks for some hundreds, of thousands of steps."""
        columns: dict[str, tuple[list[int], list[float]]] = {}
        for row in self.metrics:
            for name, value in row.items():
                if (number := finite(value)) is not None:
                    steps, values = columns.setdefault(name, ([], []))
                    steps.append(row["step"])
                    values.append(number)
        return columns

    def values(self, metric: str) -> list[float]:
        """The values of :meth:`series`."""
        return self.series(metric)[1]

    def setting(self, path: str, default: Any = None) -> Any:
        """A value of the configuration by dotted path, such as ``data.prompts_per_step``."""
        value: Any = self.config
        for key in path.split("."):
            if not isinstance(value, dict) or key not in value:
                return default
            value = value[key]
        return value

    @property
    def is_warm_start(self) -> bool:
        """Whether it was trained on given conversations (``gtpo-megatron sft``)."""
        return "sft/loss" in self.columns

    @property
    def missing_verdicts(self) -> str:
        """The commonest reasons of responses without a verdict, as last logged; empty if the log has none."""
        return next((start.missing_verdicts for start in reversed(self.starts) if start.missing_verdicts), "")

    @property
    def training_s(self) -> list[float]:
        """Seconds that each row of the metrics took, evaluation and checkpoints included."""
        return [sum(finite(row.get(f"timing/{part}_s")) or 0.0 for part in _TIMED) for row in self.metrics]

    @property
    def num_steps_done(self) -> int:
        """Number of the last step in the metrics."""
        return max((row["step"] for row in self.metrics), default=0)


def measured_sets(runs: Sequence[RunData]) -> list[str]:
    """Labels of the held-out sets of all runs: in the order of ``data.json``, then of the metrics."""
    in_order = [f"{name}_mean_at_k" for run in runs for name in run.contents]
    labels = labels_among(dict.fromkeys([*in_order, *(name for run in runs for name in run.columns)]))
    return [label for label in labels if any(mean_metric(label) in run.columns for run in runs)]


def read_runs(folders: Sequence[Path]) -> list[RunData]:
    """Reads run folders.

    Args:
        folders: at least one.

    Raises:
        DataError: no folders are given, or one does not exist.
    """
    if not folders:
        raise DataError("a report needs at least one run folder; got none")
    resolved = [folder.resolve() for folder in folders]
    for folder in resolved:
        if not folder.is_dir():
            raise DataError(f"{folder}: no such run folder; expected a folder with {METRICS_FILE}")
    return [_read_run(folder, name) for folder, name in zip(resolved, run_names(resolved), strict=True)]


def run_names(folders: Sequence[Path]) -> list[str]:
    """Folder names, with as many parents as needed to make them unique."""
    folders = [folder.resolve() for folder in folders]  # the name of "." is empty
    names = [folder.name for folder in folders]
    for depth in range(2, 1 + max(len(folder.parts) for folder in folders)):
        if len(set(names)) == len(names):
            return names
        names = [
            "/".join(folder.parts[-depth:]) if names.count(name) > 1 else name
            for folder, name in zip(folders, names, strict=True)
        ]
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]


def _read_run(folder: Path, name: str) -> RunData:
    remarks: list[str] = []
    config, text = _read_config(folder / CONFIG_FILE, remarks)
    run = RunData(name=name, config=config, config_text=text, metrics=[], groups=(), remarks=())
    metrics: list[dict[str, Any]] = []
    try:
        metrics, damage = read_what_there_is(folder / METRICS_FILE)
        remarks += [damage] if damage else []
    except (DataError, OSError) as error:
        remarks.append(str(error))
    threshold = finite(run.setting("algorithm.success_threshold"))
    groups, unread = read_groups(folder, threshold=DEFAULT_SUCCESS_THRESHOLD if threshold is None else threshold)
    remarks += [unread] if unread else []
    contents: dict[str, DataContent] = {}
    try:
        contents = read_contents(folder)
    except DataError as error:
        remarks.append(f"{error}, so it is not known which problems the run has.")
    load = None
    try:
        load = read_expert_load(folder)
    except DataError as error:
        remarks.append(f"{error}.")
    starts: list[RunStart] = []
    try:
        starts = logged_starts(folder / LOG_FILE)
    except OSError as error:
        remarks.append(f"{printable(folder / LOG_FILE)}: {reason(error)}, so commit, date and machines are not shown.")
    return replace(
        run,
        metrics=metrics,
        groups=groups,
        remarks=tuple(remarks),
        contents=contents,
        expert_load=load,
        starts=tuple(starts),
    )


def _read_config(path: Path, remarks: list[str]) -> tuple[dict[str, Any], str]:
    try:
        text = read_text(path, limit=MAX_YAML_BYTES)
        config = parse_yaml(text, printable(path))
    except DataError as error:
        remarks.append(f"{error}, so the run's settings are not shown.")
        return {}, ""
    if not isinstance(config, dict):
        remarks.append(f"{path} holds no settings.")
        return {}, text
    return config, text
