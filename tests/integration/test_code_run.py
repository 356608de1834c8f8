"""Code rewards through the whole chain: Ray, vLLM, Megatron, graders and the sandbox of bubblewrap."""

import json

import pytest

from gtpo_megatron.report.run_data import read_runs
from gtpo_megatron.run_folder.metrics_file import read_metrics
from gtpo_megatron.run_folder.rollout_log import iter_rollouts, rollout_files
from tests.integration.runs import Run
from tests.sandboxes import needs_bubblewrap

pytestmark = [
    needs_bubblewrap,
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.megatron,
    pytest.mark.slow,
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
