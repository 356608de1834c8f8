"""Metrics to MLflow.

``uv pip install mlflow-skinny``, then ``--logging.sinks examples/own_sink/mlflow_sink.py:MlflowSink``.

MLflow's own variables say where: ``MLFLOW_TRACKING_URI`` (``http://HOST:5000``, or ``file:///FOLDER`` with
``MLFLOW_ALLOW_FILE_STORE=true``) and ``MLFLOW_EXPERIMENT_NAME`` (else ``gtpo``).
"""

import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

AT_ONCE = 100
"""Parameters that a tracking server takes at a time."""
VALUE_CHARACTERS, NAME_CHARACTERS = 500, 250
"""Longest value of a parameter, and longest name of a metric, that every store takes."""


class MlflowSink:
    """One run of an experiment, which a resumed run continues; its parameters are the configuration's fields.

    A step that is made again after a resume has two points; MLflow shows the later one last.

    Args:
        folder: the run folder; ``mlflow_run_id.txt`` in it has the run's id.
        run_config: the resolved configuration.
        last_row: last step that a resumed run keeps; None for a new run.
    """

    def __init__(self, folder: Path, *, run_config: Mapping[str, Any], last_row: int | None) -> None:
        del last_row  # MLflow keeps what it was given
        self.client = MlflowClient()
        id_file = folder / "mlflow_run_id.txt"
        if id_file.exists():
            self.run_id = id_file.read_text().strip()
            self.client.update_run(self.run_id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "gtpo")
        found = self.client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self.client.create_experiment(name)
        self.run_id = self.client.create_run(experiment, run_name=folder.name).info.run_id
        params = [Param(path, str(value)[:VALUE_CHARACTERS]) for path, value in flat(run_config)]
        for first in range(0, len(params), AT_ONCE):
            self.client.log_batch(self.run_id, params=params[first : first + AT_ONCE])
        id_file.write_text(f"{self.run_id}\n")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Logs one step; values that are not finite are left out, since some stores refuse them."""
        now = int(time.time() * 1000)
        points = [
            Metric(name[:NAME_CHARACTERS], value, now, step) for name, value in scalars.items() if math.isfinite(value)
        ]
        self.client.log_batch(self.run_id, metrics=points)

    def close(self) -> None:
        """Marks the run as finished."""
        self.client.set_terminated(self.run_id)


def flat(values: Mapping[str, Any], parent: str = "") -> Iterator[tuple[str, Any]]:
    """Nested fields with their paths: ``{"a": {"b": 1}}`` gives ``a.b`` and 1."""
    for name, value in values.items():
        path = f"{parent}.{name}".strip(".")
        if isinstance(value, Mapping):
            yield from flat(value, path)
        else:
            yield path, value
