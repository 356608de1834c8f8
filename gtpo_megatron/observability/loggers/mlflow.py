"""MLflow."""

import hashlib
import importlib
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gtpo_megatron.config.output import LoggingConfig
from gtpo_megatron.observability.loggers.kept_id import keep_id, kept_id

BATCH = 100
"""Parameters that a tracking server takes at a time."""
PARAMETER_CHARACTERS = 500
"""Longest value of a parameter that every store takes."""
NAME_CHARACTERS, DIGEST = 250, 8
"""Longest name of a metric that every store takes, and characters of it that tell cut ones apart."""


class MlflowSink:
    """One run of an MLflow experiment, which a resumed run continues; its parameters are the configuration's fields.

    A step that is made again after a resume has two points; MLflow shows the later one last.

    Args:
        folder: the run folder.
        logging_config: names the experiment and the store.
        run_config: the resolved configuration.
    """

    def __init__(self, folder: Path, *, logging_config: LoggingConfig, run_config: Mapping[str, Any]) -> None:
        mlflow = importlib.import_module("mlflow")  # an optional extra: only if chosen
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._client: Any = mlflow.MlflowClient(tracking_uri=logging_config.mlflow_uri or None)
        id_file = folder / "mlflow_run_id.txt"
        known = kept_id(id_file)
        if known is None:
            name = logging_config.mlflow_experiment
            experiment = self._client.get_experiment_by_name(name)
            experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
            known = str(self._client.create_run(experiment_id, run_name=folder.name).info.run_id)
            self._log_parameters(known, run_config)
            keep_id(id_file, known)
        else:
            self._client.update_run(known, status="RUNNING")
        self._run_id = known

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Logs one step; values that are not finite are left out, since some stores refuse them."""
        now = int(time.time() * 1000)
        points = [
            self._entities.Metric(shortened(name), float(value), now, step)
            for name, value in scalars.items()
            if math.isfinite(value)
        ]
        self._client.log_batch(self._run_id, metrics=points)

    def close(self) -> None:
        """Marks the run as finished."""
        self._client.set_terminated(self._run_id)

    def _log_parameters(self, run_id: str, run_config: Mapping[str, Any]) -> None:
        fields = [
            self._entities.Param(name, str(value)[:PARAMETER_CHARACTERS]) for name, value in flat(run_config).items()
        ]
        for first in range(0, len(fields), BATCH):
            self._client.log_batch(run_id, params=fields[first : first + BATCH])


def shortened(name: str) -> str:
    """A metric's name that every store takes; a long one (of a benchmark, say) is cut, and ends with its digest."""
    if len(name) <= NAME_CHARACTERS:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:DIGEST]
    return f"{name[: NAME_CHARACTERS - DIGEST - 1]}_{digest}"


def flat(values: Mapping[str, Any], parent: str = "") -> dict[str, Any]:
    """Nested fields by their paths: ``{"a": {"b": 1}}`` becomes ``{"a.b": 1}``."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{parent}.{name}".strip(".")
        found |= flat(value, path) if isinstance(value, Mapping) else {path: value}
    return found
