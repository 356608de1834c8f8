"""Reads a run folder for a report: whatever is there, with a sentence for what is not.

A run may be running, crashed, or written by an older version, so nothing here insists: the configuration is read as
plain values, a cut last line is left out, and what cannot be read becomes a remark that the report shows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gtpo_megatron.errors import DataError
from gtpo_megatron.observability.metrics_file import METRICS_FILE, read_metrics
from gtpo_megatron.observability.rollout_log import RolloutRecord, read_rollouts, rollout_files

CONFIG_FILE = "config.yaml"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """What a report needs of one run.

    Attributes:
        name: unique among the runs of the report.
        config: plain values of ``config.yaml``; empty if it cannot be read.
        config_text: ``config.yaml`` as it is.
        metrics: one mapping a step, see :func:`read_metrics`.
        rollout_step: the last step with sampled texts.
        rollouts: the responses of that step.
        remarks: sentences on what could not be read.
    """

    name: str
    config: dict[str, Any]
    config_text: str
    metrics: list[dict[str, Any]]
    rollout_step: int | None
    rollouts: list[RolloutRecord]
    remarks: tuple[str, ...]

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric; steps at which it is absent or was not a number are left out."""
        points = [(row["step"], row[metric]) for row in self.metrics if isinstance(row.get(metric), int | float)]
        finite = [(step, float(value)) for step, value in points if math.isfinite(value)]
        return [step for step, _ in finite], [value for _, value in finite]

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
    def num_steps_done(self) -> int:
        """Number of the last step in the metrics."""
        return max((row["step"] for row in self.metrics), default=0)


def read_runs(folders: Sequence[Path]) -> list[RunData]:
    """Reads run folders.

    Args:
        folders: at least one.

    Raises:
        DataError: no folders, or one that does not exist.
    """
    if not folders:
        raise DataError("a report needs at least one run folder; got none")
    resolved = [folder.resolve() for folder in folders]
    for folder in resolved:
        if not folder.is_dir():
            raise DataError(f"{folder}: no such run folder; expected a folder with {METRICS_FILE}")
    return [_read_run(folder, name) for folder, name in zip(resolved, _names(resolved), strict=True)]


def _names(folders: Sequence[Path]) -> list[str]:
    """Folder names, with as many parents before them as it takes to tell the runs apart."""
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
    metrics: list[dict[str, Any]] = []
    try:
        metrics = read_metrics(folder / METRICS_FILE)
    except (DataError, OSError) as error:
        remarks.append(str(error))
    step, rollouts = _last_rollouts(folder, remarks)
    return RunData(
        name=name,
        config=config,
        config_text=text,
        metrics=metrics,
        rollout_step=step,
        rollouts=rollouts,
        remarks=tuple(remarks),
    )


def _read_config(path: Path, remarks: list[str]) -> tuple[dict[str, Any], str]:
    try:
        text = path.read_text(encoding="utf-8")
        config = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        remarks.append(f"{path} cannot be read ({error}), so the run's settings are not shown.")
        return {}, ""
    if not isinstance(config, dict):
        remarks.append(f"{path} holds no settings.")
        return {}, text
    return config, text


def _last_rollouts(folder: Path, remarks: list[str]) -> tuple[int | None, list[RolloutRecord]]:
    for step, path in reversed(rollout_files(folder)):
        try:
            records = read_rollouts(path)
        except (DataError, OSError) as error:
            remarks.append(str(error))
            continue
        if records:
            return step, records
    return None, []
