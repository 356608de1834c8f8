"""The sinks of ``examples/own_sink`` with the real MLflow, Trackio and SwanLab, without a network: where installed."""

import contextlib
import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from gtpo_megatron.config.output import LoggingConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.observability.sinks import check_loggers

SINKS = Path(__file__).parents[3] / "examples" / "own_sink"


def installed(module):
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"no {module}: uv pip install {module}")


WRITE = """
import json, math, sys
from pathlib import Path
from gtpo_megatron.config.output import LoggingConfig
from gtpo_megatron.observability.sinks import open_sinks
folder, first, sink = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
run_config = {"seed": 7, "model": {"path": "m", "dtype": "float32"}}
last_row = first - 1 if first > 1 else None
with open_sinks(folder, LoggingConfig(sinks=(sink,)), run_config=run_config, last_row=last_row) as sinks:
    for step in (first, first + 1):
        sinks.write(step, {"policy/loss": step / 8, "rollout/reward_mean": math.nan if step == 2 else 0.5})
assert sinks.failures == {}, sinks.failures
"""


def python(code, *arguments, **environment):
    """In a process of its own, as these libraries start threads and exit handlers."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def two_sessions(folder, sink, **environment):
    folder.mkdir()
    for first in (1, 3):
        python(WRITE, folder, first, SINKS / sink, **environment)


READ_MLFLOW = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(tracking_uri=sys.argv[1])
experiment = client.get_experiment_by_name("gtpo")
[run] = client.search_runs([experiment.experiment_id])
points = {
    name: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]
    for name in ("policy/loss", "rollout/reward_mean")
}
info = run.info
print(json.dumps([info.run_id, info.run_name, info.status, run.data.params, points]))
"""


@pytest.mark.slow
@installed("mlflow")
def test_mlflow_has_one_run_with_all_values_after_two_sessions(tmp_path):
    uri = f"file://{tmp_path}/store"
    allowed = {"MLFLOW_ALLOW_FILE_STORE": "true"}
    two_sessions(tmp_path / "run", "mlflow_sink.py:MlflowSink", MLFLOW_TRACKING_URI=uri, **allowed)
    run_id, name, status, params, points = json.loads(python(READ_MLFLOW, uri, **allowed))
    assert run_id == (tmp_path / "run" / "mlflow_run_id.txt").read_text().strip()
    assert (name, status) == ("run", "FINISHED")
    assert params == {"seed": "7", "model.path": "m", "model.dtype": "float32"}
    assert points["policy/loss"] == [[1, 0.125], [2, 0.25], [3, 0.375], [4, 0.5]]
    assert points["rollout/reward_mean"] == [[1, 0.5], [3, 0.5], [4, 0.5]]  # what is not finite is left out


@installed("trackio")
def test_trackio_has_one_run_after_two_sessions(tmp_path):
    store = tmp_path / "store"
    two_sessions(tmp_path / "run", "trackio_sink.py:TrackioSink", TRACKIO_DIR=str(store), HF_HUB_OFFLINE="1")
    name = f"run-{(tmp_path / 'run' / 'trackio_run_id.txt').read_text().strip()}"
    [database] = store.rglob("gtpo*.db")
    with contextlib.closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    assert {row[0] for row in rows} == {name}
    found = [(step, json.loads(metrics)["policy/loss"]) for _, step, metrics in rows]
    assert found == [(1, 0.125), (2, 0.25), (3, 0.375), (4, 0.5)]


@installed("swanlab")
def test_swanlab_writes_into_the_run_folder(tmp_path):
    two_sessions(tmp_path / "run", "swanlab_sink.py:SwanLabSink", SWANLAB_MODE="offline")
    assert list((tmp_path / "run" / "swanlog").glob("run-*"))


def test_a_library_that_is_not_installed_is_found_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match="mlflow"):
        check_loggers(LoggingConfig(sinks=(f"{SINKS}/mlflow_sink.py:MlflowSink",)))
