"""A run folder whose files have the right shape and the wrong content: a page and a remark, never a crash."""

import json

import pytest

from gtpo_megatron.companions.report.page import content, document
from gtpo_megatron.companions.report.run_data import read_runs
from tests.unit.companions.report.run_folders import CONFIG, make_run

RECORD = {
    "group_id": 1, "policy_version": 0, "prompt": "p", "response": "ab", "tokens": ["a", "b"],
    "token_entropy": [0.1, 2], "shaped_rewards": [1.0, 1.0], "advantages": [0.5, -0.5], "reward": 1.0,
    "truncated": False,
}  # fmt: skip


def page_of(*folders):
    shown = content(read_runs(folders))
    document(shown)  # JSON without NaN
    return shown


def run_with(folder, *, metrics=({"step": 1, "rollout/reward_mean": 0.5},), config="num_steps: 2\n", records=()):
    folder.mkdir()
    (folder / "config.yaml").write_text(config)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    if records:
        (folder / "rollouts").mkdir()
        (folder / "rollouts" / "step_000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    return folder


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("advantages", [float("nan"), 0.0]),
        ("advantages", [1e308, 0.0]),  # two of them have no finite sum
        ("shaped_rewards", [float("inf"), 0.0]),
        ("token_entropy", [None, 0.0]),
        ("token_entropy", ["x", 0.0]),
        ("token_entropy", ["1", "2"]),
        ("token_entropy", [[0.1], [0.2]]),
        ("token_entropy", [[0.1], 0.2]),
        pytest.param("token_entropy", [10**400, 0.1], id="token_entropy-huge"),
        ("token_entropy", 0.1),
        ("tokens", [1, 2]),
        ("tokens", ["a", None]),
        ("tokens", "ab"),
        ("reward", None),
        ("reward", "1"),
        ("reward", True),
        ("reward", float("nan")),
        pytest.param("reward", 10**400, id="reward-huge"),
        ("prompt", None),
        ("answer", 5),
        ("group_id", [1]),
        ("group_id", "1"),
        ("truncated", "no"),
        ("reward_failed", 0),
    ],
)
def test_a_record_with_a_wrong_value_is_a_remark_that_names_it(tmp_path, field, value):
    run = run_with(tmp_path / "run", records=[RECORD, RECORD | {field: value}])
    shown = page_of(run)
    assert shown.data["runs"][0]["groups"] == []
    assert shown.main.count('class="remark"') == 1
    assert "step_000001.jsonl:2: not a rollout record" in shown.main
    reason = shown.main.split("not a rollout record")[1]
    assert field in reason or "an integer of 401 digits" in reason
    assert "reward" in shown.data["figures"]


@pytest.mark.parametrize("line", ["[]", "5", "null", '"text"'])
def test_a_line_that_is_no_object_is_a_remark(tmp_path, line):
    run = run_with(tmp_path / "run", records=[RECORD])
    (run / "rollouts" / "step_000001.jsonl").write_text(line + "\n")
    assert "step_000001.jsonl:1: not a rollout record" in page_of(run).main


@pytest.mark.slow
@pytest.mark.parametrize("name", ["timing/rollout_s", "timing/step_s", "rollout/reward_mean", "memory/peak_gib"])
@pytest.mark.parametrize("value", ["x", [1], {}, True, pytest.param(10**400, id="huge"), 1e308, float("nan")])
def test_a_metric_that_is_not_a_number_is_left_out(tmp_path, name, value):
    good = {"timing/rollout_s": 1.0, "timing/step_s": 2.0, "rollout/reward_mean": 0.5, "memory/peak_gib": 1.5}
    rows = [{"step": 1} | good, {"step": 2} | good | {name: value}, {"step": 3} | good | {name: value}]
    figures = page_of(run_with(tmp_path / "run", metrics=rows)).data["figures"]
    assert set(figures) == {"reward", "time", "memory"}
    assert all(0 <= y <= 2 for figure in figures.values() for trace in figure["data"] for y in trace["y"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        "evaluation: {samples: [1, 2]}",
        "evaluation: {samples: {}}",
        "algorithm: 3\nnum_steps: abc",
        "algorithm: {success_threshold: .nan, kind: [1]}",
        pytest.param("algorithm: {success_threshold: 1" + "0" * 400 + "}", id="huge"),
        "weight_sync: {mismatch: .inf}",
        "num_steps: 3.5\nname: [1]\noptimizer: {learning_rate: .nan}",
    ],
)
def test_a_setting_of_the_wrong_kind_does_not_stop_the_page(tmp_path, config):
    rows = [{"step": 1, "eval/heldout_mean_at_k": 0.1, "sync/logprob_gap_max": 1e-5}]
    odd = run_with(tmp_path / "odd", metrics=rows, config=config + "\n", records=[RECORD])
    assert {"heldout", "gap"} <= set(page_of(odd).data["figures"])
    assert {"heldout", "gap"} <= set(page_of(odd, make_run(tmp_path / "good", config=CONFIG)).data["figures"])


def test_many_unreadable_files_are_one_remark(tmp_path):
    run = run_with(tmp_path / "run", records=[RECORD])
    old = {name: value for name, value in RECORD.items() if name != "shaped_rewards"}
    for step in range(2, 201):
        (run / "rollouts" / f"step_{step:06d}.jsonl").write_text(json.dumps(old) + "\n")
    shown = page_of(run)
    assert shown.main.count('class="remark"') == 1
    assert "shaped_rewards" in shown.main
    assert "199 of 200" in shown.main


def test_after_an_upgrade_the_readable_files_are_found(tmp_path):
    run = run_with(tmp_path / "run", records=[RECORD])
    for step in range(1, 101):
        old = {name: value for name, value in RECORD.items() if name != "shaped_rewards"}
        row = RECORD | {"group_id": step} if step > 50 else old
        (run / "rollouts" / f"step_{step:06d}.jsonl").write_text(json.dumps(row) + "\n")
    shown = page_of(run)
    steps = [group["step"] for group in shown.data["runs"][0]["groups"]]
    assert len(steps) > 25
    assert (min(steps) > 50, max(steps)) == (True, 100)
    assert shown.main.count('class="remark"') == 1
