"""``gtpo-megatron preflight`` on real ranks, a real engine and a real Ray: whole, in short, and where it must fail."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import LEAVINGS, STARTED

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.megatron, LEAVINGS, pytest.mark.timeout(400)]

COMMAND = str(Path(sys.executable).with_name("gtpo-megatron"))
SMALL = ["--data.prompts-per-step", "4", "--rollout.group-size", "4"]


def preflight(output, *options, timeout_s=380):
    """Status, printed lines and the report of a preflight."""
    command = [COMMAND, "preflight", "recipes.tiny_cpu:gtpo", "--output", str(output), *options]
    log = output.with_suffix(".log")
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    STARTED.append(process)
    status = process.wait(timeout_s)
    text = log.read_text(errors="replace")
    assert (output / "preflight.json").exists(), text[-3000:]
    return status, text, json.loads((output / "preflight.json").read_text())


def statuses(report):
    """Check -> its statuses."""
    found = {}
    for line in report["lines"]:
        found.setdefault(line["check"], []).append(line["status"])
    return found


@pytest.mark.nightly
def test_in_short(tmp_path):
    """What it runs of a run: start, collectives, push, generation, comparison, update, push, checkpoint, end."""
    only = ["--only", "collectives", "logprobs", "new-weights", "checkpoint", "network", "end"]
    status, text, report = preflight(tmp_path / "out", *only, *SMALL)
    assert status == 0, text[-3000:]
    found = statuses(report)
    assert set(found) == {
        *("inputs", "network", "start", "collectives", "push", "generate", "rewards", "logprobs", "update"),
        *("new-weights", "checkpoint", "end"),
    }
    for check in ("push", "logprobs", "update", "new-weights", "checkpoint", "end"):
        assert found[check] == ["passed"], report
    assert found["collectives"].count("noted") == 1, "two tensor-parallel ranks"
    assert "checksums agree" in text
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["log.txt", "preflight.html", "preflight.json"]


@pytest.mark.nightly
def test_whole(tmp_path):
    status, text, report = preflight(tmp_path / "out")
    assert status == 0, text[-3000:]
    assert report["passed"]
    found = statuses(report)
    assert len(found) == 24
    assert found["layer"] == ["passed"]
    assert found["transports"] == ["passed", "not here"]
    figures = {line["check"]: line["figures"] for line in report["lines"]}
    parts = figures["step-time"]
    assert parts["step_s"] == pytest.approx(
        sum(parts[f"{name}_s"] for name in ("generate", "reward", "score", "update", "push"))
    )
    assert figures["memory"].keys() == {f"{phase}_bytes" for phase in ("push", "generate", "score", "train", "save")}


@pytest.mark.nightly
def test_limits_that_are_exceeded_fail_and_the_rest_goes_on(tmp_path):
    """No log-probs agree to 1e-30 nats."""
    limits = ["--weight-sync.mismatch.scaled-nats", "1e-30"]
    status, text, report = preflight(tmp_path / "out", "--only", "logprobs", "checkpoint", *limits, *SMALL)
    assert status == 1
    assert not report["passed"]
    found = statuses(report)
    assert (found["logprobs"], found["checkpoint"]) == (["failed"], ["passed"])
    assert "what to do: the sampler is not the trainer's policy" in text


@pytest.mark.nightly
def test_without_a_model_the_machines_are_checked_all_the_same(tmp_path):
    status, text, report = preflight(tmp_path / "out", "--model.path", str(tmp_path / "nowhere"))
    assert status == 1
    found = statuses(report)
    assert found["inputs"] == ["failed"]
    assert found["clocks"][0] == "passed"
    assert found["push"] == found["start"] == ["not run"]
    assert "it needs 'inputs', which failed" in text
