"""The Parquet file of sampled responses: what is in ``rollouts/`` and nothing else, a row a response."""

import json
from dataclasses import replace

import pyarrow.parquet
import pytest

from gtpo_megatron.companions.report import response_table
from gtpo_megatron.companions.report.response_table import write_responses
from gtpo_megatron.errors import DataError
from gtpo_megatron.run_folder.rollout_log import RolloutLog, RolloutRecord
from tests.unit.companions.report.run_folders import make_run, response

MIXED = RolloutRecord(
    group_id=4, policy_version=11, prompt="p", response="a<out>b", tokens=["a", "<", "out>", "b"],
    token_entropy=[0.5, 0.0, 0.0, 1.5], shaped_rewards=[1.0, 0.0, 0.0, 1.5], advantages=[0.25, 0.0, 0.0, 0.75],
    reward=0.75, truncated=True, foreign_spans=[(1, 3)], answer="7", problem_id="gsm8k/12",
    parts={"tests": 0.5, "format": 1.0}, info='{"a": 1}',
)  # fmt: skip


def rows_of(path):
    return pyarrow.parquet.read_table(path).to_pylist()


def write(folder, step, records):
    RolloutLog(folder, groups_per_step=9).write(step, records)


def test_a_row_has_everything_that_is_known_of_a_response(tmp_path):
    run = make_run(tmp_path / "run", responses=False)
    write(run, 12, [MIXED, replace(MIXED, reward_failed=True, parts={"tests": 0.0}, info="", problem_id="")])
    assert write_responses([run], tmp_path / "new" / "x.parquet") == 2
    first, second = rows_of(tmp_path / "new" / "x.parquet")
    assert first == {
        "run": "run", "step": 12, "group_id": 4, "response_number": 1, "problem_id": "gsm8k/12", "policy_version": 11,
        "reward": 0.75, "reward_failed": False, "reward/format": 1.0, "reward/tests": 0.5, "mean_advantage": 0.5,
        "mean_shaped_reward": 1.25, "mean_entropy_nats": 1.0, "response_tokens": 2, "foreign_tokens": 2,
        "truncated": True, "prompt": "p", "answer": "7", "response": "a<out>b", "info": '{"a": 1}',
    }  # fmt: skip
    assert second["response_number"] == 2
    assert [second[name] for name in ("reward", "reward/format", "problem_id", "info")] == [None] * 4
    assert second["reward/tests"] == 0.0


def test_all_files_of_all_runs_are_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr(response_table, "ROWS_PER_GROUP", 7)
    runs = [make_run(tmp_path / name, responses=False) for name in ("a", "b")]
    for run in runs:
        for step in range(1, 71):  # more than a page reads
            write(run, step, [response(step, 1.0), response(step, 0.0)])
    assert write_responses(runs, tmp_path / "x.parquet") == 280
    rows = rows_of(tmp_path / "x.parquet")
    assert [row["run"] for row in rows] == ["a"] * 140 + ["b"] * 140
    assert [row["step"] for row in rows[:140:2]] == list(range(1, 71))
    assert not [name for name in rows[0] if name.startswith("reward/")]
    assert rows[0]["mean_advantage"] == pytest.approx(0.75)


def test_half_a_surrogate_pair_and_an_empty_response_are_rows(tmp_path):
    run = make_run(tmp_path / "run", responses=False)
    empty = replace(MIXED, tokens=(), token_entropy=(), shaped_rewards=(), advantages=(), foreign_spans=())
    write(run, 1, [replace(MIXED, response="\ud83d"), empty])
    write_responses([run], tmp_path / "x.parquet")
    half, none = rows_of(tmp_path / "x.parquet")
    assert half["response"] == "?"
    assert (none["response_tokens"], none["mean_advantage"]) == (0, None)


def test_nothing_to_write_and_a_damaged_file_leave_no_file(tmp_path):
    run = make_run(tmp_path / "run", responses=False)
    out = tmp_path / "x.parquet"
    with pytest.raises(DataError, match="no such run folder"):
        write_responses([tmp_path / "typo"], out)
    with pytest.raises(DataError, match=r"no sampled responses .*logging\.rollout_groups_per_step"):
        write_responses([run], out)
    write(run, 1, [MIXED])
    write(run, 2, [MIXED])
    path = run / "rollouts" / "step_000002.jsonl"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"group_id": 2**70}) + "\n")
    with pytest.raises(DataError, match="is no table"):
        write_responses([run], out)
    path.write_text("{}\n")
    with pytest.raises(DataError, match=r"step_000002\.jsonl:1: not a rollout record"):
        write_responses([run], out)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run"]
