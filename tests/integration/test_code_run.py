"""Code rewards through the whole chain: Ray, vLLM, Megatron, graders and the sandbox of bubblewrap."""

import json

import pytest

from gtpo_megatron.companions.report.run_data import read_runs
from gtpo_megatron.run_folder.metrics_file import read_metrics
from gtpo_megatron.run_folder.rollout_log import iter_rollouts, rollout_files
from recipes.tiny_cpu import ASSETS
from tests.integration.runs import Run
from tests.integration.test_evaluate import finish, launch
from tests.sandboxes import needs_bubblewrap

pytestmark = [
    needs_bubblewrap,
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.megatron,
    pytest.mark.nightly,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore"),
]


def test_programs_are_graded_by_their_tests_and_the_report_says_which_passed(tmp_path):
    run = Run(tmp_path / "run", recipe="recipes.tiny_cpu:code_gtpo", num_steps=2)
    assert run.process.wait(timeout=900) == 0, run.output[-3000:]
    rows = read_metrics(run.folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["rollout/reward_failed_count"] == 0
        assert 0.0 < row["reward/has_code_mean"] <= 1.0
        assert 0.0 <= row["rollout/reward_mean"] <= row["reward/tests_passed_mean"] <= 1.0
    records = [record for _, path in rollout_files(run.folder) for record in iter_rollouts(path)]
    assert records
    for record in records:
        told = json.loads(record.info)
        assert told.keys() in ({"tests"}, {"compiler"}, {"program"})
        passed = [verdict == "passed" for verdict in told.get("tests", [False])]
        assert record.reward == float(all(passed))
        assert record.parts["tests_passed"] == pytest.approx(sum(passed) / len(passed), abs=1e-6)
    [shown] = read_runs([run.folder])
    assert any(response.info for group in shown.groups for response in group.responses)
    assert "reward-parts" in (run.folder / "report.html").read_text(encoding="utf-8")


def test_evaluate_grades_programs_by_the_same_tests_and_writes_down_which_passed(tmp_path):
    output = tmp_path / "evaluation"
    arguments = ["evaluate", str(ASSETS / "tiny_coder"), "--benchmarks", f"programs={ASSETS}/programs/heldout.jsonl"]
    arguments += ["--reward.function", "gtpo_megatron.rewards.code_tests:code_tests", "--success-threshold", "1.0"]
    arguments += ["--samples", "4", "--num-problems", "16", "--reward.timeout-s", "60", "--output", str(output)]
    arguments += ["--engine.dtype", "float32", "--engine.kv-cache-mib", "256", "--max-prompt-tokens", "96"]
    arguments += ["--sampling.max-response-tokens", "48", "--against", f"{ASSETS}/programs/train.jsonl"]
    status, text = finish(launch(arguments, output), output)
    assert status == 0, text[-3000:]
    verdicts = [json.loads(line) for line in (output / "verdicts.jsonl").read_text().splitlines() if '"sample"' in line]
    assert len(verdicts) == 64
    for verdict in verdicts:
        assert verdict["failure"] is None
        passed = [one == "passed" for one in json.loads(verdict["info"]).get("tests", [False])]
        assert verdict["reward"] == float(all(passed))
        assert verdict["parts"]["tests_passed"] == pytest.approx(sum(passed) / len(passed), abs=1e-6)
    found = json.loads((output / "evaluation.json").read_text())["benchmarks"]["programs"]["figures"]
    assert found["mean@4"]["mean"] == pytest.approx(sum(verdict["reward"] for verdict in verdicts) / 64)
    assert 0 < found["mean@4"]["mean"] < found["pass@4"]["mean"] <= 1
