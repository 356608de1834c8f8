"""The real Weights & Biases library, without a network: runs where the extra ``wandb`` is installed."""

import importlib.util
import json
import struct
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="no wandb: uv pip install wandb")

WRITE = """
import sys
from pathlib import Path
from gtpo_megatron.config.output import LoggingConfig
from gtpo_megatron.observability.sinks import open_sinks
config = LoggingConfig(wandb_project="gtpo", wandb_mode="offline")
folder, first = Path(sys.argv[1]), int(sys.argv[2])
with open_sinks(folder, config, run_config={"seed": 7}, last_row=first - 1 if first > 1 else None) as sinks:
    for step in (first, first + 1):
        sinks.write(step, {"policy/loss": step / 8})
assert sinks.failures == {}
"""

HEADER_BYTES, RECORD_HEADER = 7, struct.Struct("<IHB")
"""Of the file, and of each record in it: checksum, length, type; this test's file has whole records only."""


def written(path):
    """The records of a ``.wandb`` file."""
    from wandb.proto import wandb_internal_pb2

    data, at, records = path.read_bytes(), HEADER_BYTES, []
    while at + RECORD_HEADER.size <= len(data):
        _, length, kind = RECORD_HEADER.unpack_from(data, at)
        assert kind == 1
        at += RECORD_HEADER.size
        records.append(wandb_internal_pb2.Record.FromString(data[at : at + length]))
        at += length
    return records


def log(folder, first):
    """In a process of its own, as wandb starts a service and exit handlers."""
    done = subprocess.run(
        [sys.executable, "-c", WRITE, str(folder), str(first)], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr


def test_two_sessions_of_a_run_write_one_id_and_all_values(tmp_path):
    log(tmp_path, 1)
    log(tmp_path, 3)
    run_ids, settings, points = set(), [], []
    for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for record in written(path):
            if record.HasField("run"):
                run_ids.add((record.run.run_id, record.run.project))
                settings += [(item.key, item.value_json) for item in record.run.config.update]
            if record.HasField("history"):
                row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                points.append((json.loads(row["step"]), json.loads(row["policy/loss"])))
    assert run_ids == {((tmp_path / "wandb_run_id.txt").read_text().strip(), "gtpo")}
    assert ("seed", "7") in settings
    assert points == [(1, 0.125), (2, 0.25), (3, 0.375), (4, 0.5)]
