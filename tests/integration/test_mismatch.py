"""A real trainer and a real vLLM that do not have the same policy, and the gate between them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gtpo_megatron.mismatch.gap_report import CONTEXT_BEFORE
from gtpo_megatron.run_folder.metrics_file import read_metrics
from recipes.tiny_cpu import ASSETS

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.megatron,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("a probe of the gate"),
]


def python(*arguments):
    """What a module prints."""
    found = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


@pytest.mark.parametrize(
    ("dtype", "source"),
    [
        *(pytest.param(dtype, "actor", marks=pytest.mark.nightly) for dtype in ("float32", "bfloat16")),
        ("bfloat16", "rollout"),
    ],
)
def test_a_run_stops_at_the_step_after_a_broken_push_and_says_where(tmp_path, dtype, source):
    folder = tmp_path / "run"
    (line,) = [
        line
        for line in python("tests.integration.mismatch_probe", str(folder), "2", dtype, source).splitlines()
        if line.startswith("stopped: ")
    ]
    assert line.startswith("stopped: policy version 2: sampler and trainer do not have the same policy: ")
    assert "it looks like tokens of all kinds, at all positions" in line
    assert f"the worst 20 tokens are in {folder / 'worst_tokens.json'}" in line
    found = json.loads((folder / "worst_tokens.json").read_text())
    gaps = [token["gap_nats"] for token in found["tokens"]]
    assert gaps == sorted(gaps, reverse=True)
    assert len(gaps) == 20
    assert gaps[0] > 1
    assert all(
        abs(t["sampler_logprob"] - t["trainer_logprob"]) == pytest.approx(t["gap_nats"]) for t in found["tokens"]
    )
    # the prompt's last two tokens are among the nearest before it, as long as they are
    assert all(
        ("assistant\n" in token["before"]) == (token["position"] + 2 <= CONTEXT_BEFORE) for token in found["tokens"]
    )
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 0]
    assert [row["step"] for row in rows] == [1, 2]  # the third step has no row: it was not learnt from
    for row in rows:
        for name in ("gap_scaled", "gap_beyond_frac"):
            assert row[f"sync/logprob_{name}"] <= row[f"sync/logprob_{name}_limit"]


@pytest.mark.nightly
def test_clean_steps_pass_and_faults_are_caught(tmp_path):
    """A short version of ``benchmarks/mismatch.py``."""
    cell = {"trainer": "bfloat16", "sampler": "bfloat16", "head": "float32", "temperature": 1.0, "prompts": 8}
    faults = ["one layer not pushed", "q and k bias dropped", "wrong norm epsilon"]
    result = tmp_path / "cell.jsonl"
    python(
        "benchmarks.mismatch_cell", json.dumps(cell | {"is_random": False}), str(ASSETS / "tiny_qwen2"), "5",
        json.dumps(faults), str(result),
    )  # fmt: skip
    lines = [json.loads(line) for line in result.read_text().splitlines()]
    clean = [line for line in lines if "step" in line]
    assert len(clean) == 6
    assert [line["broken"] for line in clean] == [[]] * 6
    caught = {
        line["fault"]: {by for by in ("broken", "checksum", "settings") if line[by]}
        for line in lines
        if "fault" in line
    }
    assert caught.keys() == set(faults)
    assert "checksum" in caught["one layer not pushed"]
    assert caught["q and k bias dropped"] == {"broken"}
    assert "settings" in caught["wrong norm epsilon"]
