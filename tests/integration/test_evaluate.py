"""``gtpo-megatron evaluate`` on a real vLLM engine: whole, interrupted and resumed, and cut by the length limit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gtpo_megatron.config.serialize import to_yaml
from gtpo_megatron.run_folder.checkpoints import CheckpointFolder
from recipes import tiny_cpu
from recipes.tiny_cpu import ASSETS
from tests.integration.runs import STARTED
from tests.unit.companions.evaluate.makers import saved_verdicts
from tests.unit.orchestration.checkpoints import save_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]
PROBLEMS, SAMPLES = 96, 4  # so many that a signal after the first responses comes long before the last


COMMAND = str(Path(sys.executable).with_name("gtpo-megatron"))


def start(output, *options, num_problems=PROBLEMS, samples=SAMPLES, tokens=128):
    heldout, train = ASSETS / "arithmetic" / "heldout.jsonl", ASSETS / "arithmetic" / "train.jsonl"
    arguments = ["evaluate", str(ASSETS / "tiny_qwen2"), "--benchmarks", f"arithmetic={heldout}"]
    arguments += ["--samples", str(samples), "--num-problems", str(num_problems), "--against", str(train)]
    arguments += ["--engine.dtype", "float32", "--engine.kv-cache-mib", "256", "--max-prompt-tokens", "96"]
    arguments += ["--sampling.max-response-tokens", str(tokens), "--output", str(output), *options]
    return launch(arguments, output)


def launch(arguments, output):
    """``gtpo-megatron`` with these arguments; what it prints goes beside ``output``."""
    with (output.parent / f"{output.name}.log").open("ab") as log:
        process = subprocess.Popen([COMMAND, *arguments], stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    STARTED.append(process)
    return process


def finish(process, output, timeout_s=400):
    status = process.wait(timeout_s)
    return status, (output.parent / f"{output.name}.log").read_text(errors="replace")


def result(output):
    return json.loads((output / "evaluation.json").read_text())


def test_interrupted_and_resumed_equals_whole(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    status, text = finish(start(whole), whole)
    assert status == 0, text[-3000:]
    assert "mean@4" in text
    found = result(whole)
    entry = found["benchmarks"]["arithmetic"]
    assert found["complete"] is True
    assert (entry["num_problems"], entry["num_complete"]) == (PROBLEMS, PROBLEMS)
    mean = entry["figures"]["mean@4"]["mean"]
    assert 0.05 < mean < entry["figures"]["pass@4"]["mean"] < 1
    assert mean == pytest.approx(entry["figures"]["pass@1"]["mean"])
    assert entry["contamination"]["matches"] == []
    responses = {r.key: r.response for r in saved_verdicts(whole / "verdicts.jsonl")}
    assert len(responses) == PROBLEMS * SAMPLES

    process = start(broken)
    file = broken / "verdicts.jsonl"
    deadline = time.monotonic() + 300
    while not (file.exists() and file.read_bytes().count(b"\n") > 40):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    status, text = finish(process, broken, 60)
    assert status == 130, text[-3000:]
    assert "interrupted; the same command goes on" in text
    partial = result(broken)
    kept = len(saved_verdicts(file))
    before = file.read_bytes()
    assert partial["complete"] is False
    assert 40 <= kept < PROBLEMS * SAMPLES

    status, text = finish(start(broken), broken)
    assert status == 0, text[-3000:]
    assert f"{kept} of {PROBLEMS * SAMPLES} responses are in" in text
    again = result(broken)["benchmarks"]["arithmetic"]
    assert file.read_bytes().startswith(before), "lines are only added"
    rows = saved_verdicts(file)
    assert len(rows) == len({r.key for r in rows}) == PROBLEMS * SAMPLES
    # the same seeds; other neighbours in a batch may move a last bit, and with it a response
    assert again["figures"]["mean@4"]["mean"] == pytest.approx(mean, abs=0.03)
    equal = [responses[r.key] == r.response for r in rows]
    assert sum(equal) >= 0.95 * len(equal)


@pytest.mark.nightly
def test_a_model_that_never_stops_is_cut_and_counted(tmp_path):
    output = tmp_path / "out"
    status, text = finish(start(output, "--ks", "2", num_problems=4, samples=2, tokens=6), output)
    assert status == 0, text[-3000:]
    entry = result(output)["benchmarks"]["arithmetic"]
    assert entry["truncated_frac"] == 1.0
    assert entry["response_tokens_mean"] == 6.0
    assert entry["figures"]["mean@2"]["mean"] == 0.0
    assert set(entry["figures"]) == {"mean@2", "reward", "pass@2", "best@2", "maj@2"}


def conversations(output):
    """What the result says of conversations with the calculator."""
    heldout = ASSETS / "arithmetic" / "heldout.jsonl"
    arguments = ["evaluate", str(ASSETS / "tiny_tool_user"), "--benchmarks", f"arithmetic={heldout}"]
    arguments += ["--environment.name", "recipes.calculator:Calculator", "--environment.max-turns", "4"]
    arguments += ["--samples", "4", "--num-problems", "32", "--engine.dtype", "float32"]
    arguments += ["--engine.kv-cache-mib", "64", "--max-prompt-tokens", "96"]
    arguments += ["--sampling.max-response-tokens", "128", "--output", str(output)]
    status, text = finish(launch(arguments, output), output)
    assert status == 0, text[-3000:]
    return result(output)["benchmarks"]["arithmetic"]


def test_a_model_holds_conversations(tmp_path):
    """Graded by the environment."""
    output = tmp_path / "out"
    entry = conversations(output)
    rows = saved_verdicts(output / "verdicts.jsonl")
    assert len(rows) == 32 * 4
    assert all(row.failure is None for row in rows)
    assert entry["figures"]["mean@4"]["mean"] == sum(row.reward for row in rows) / len(rows)
    assert 0.02 < entry["figures"]["mean@4"]["mean"] < entry["figures"]["pass@4"]["mean"] < 1
    assert "maj@4" not in entry["figures"], "an environment finds no answers to vote with"
    turns = [row.parts["turns"] for row in rows]
    assert max(turns) >= 2
    assert all(("<tool_response>" in row.response) == (row.parts["turns"] > 1) for row in rows)


@pytest.mark.nightly
def test_the_same_command_adds_no_conversation_to_what_is_whole(tmp_path):
    output = tmp_path / "out"
    figures, rows = conversations(output)["figures"], saved_verdicts(output / "verdicts.jsonl")
    assert conversations(output)["figures"] == figures
    assert saved_verdicts(output / "verdicts.jsonl") == rows


@pytest.mark.nightly
def test_a_checkpoint_of_a_run_is_converted_and_measured_as_the_run_was(tmp_path):
    """Named by its folder. It holds the tiny model, which solves about a quarter; wrong weights would solve nothing."""
    run = tmp_path / "run"
    save_model(CheckpointFolder(run / "checkpoints"), 4)
    (run / "config.yaml").write_text(to_yaml(tiny_cpu.gtpo()))
    output = run / "evaluations" / "step_4"
    named = ["evaluate", str(run / "checkpoints" / "step_4"), "--num-problems", "32", "--samples", "4"]
    status, text = finish(launch(named, run), run)
    assert status == 0, text[-3000:]
    found = result(output)
    assert (found["complete"], found["model"]["checkpoint"]) == (True, "step_4")
    entry = found["benchmarks"]["heldout"]
    assert (entry["num_complete"], entry["samples"]) == (32, 4)
    assert 0.05 < entry["figures"]["mean@4"]["mean"] < 0.6
