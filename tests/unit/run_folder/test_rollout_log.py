import json

import pytest

from gtpo_megatron.branches import Branch
from gtpo_megatron.errors import DataError
from gtpo_megatron.run_folder.rollout_log import (
    RolloutLog,
    RolloutRecord,
    foreign_spans,
    iter_rollouts,
    rollout_files,
)


def record(**changes):
    values = {
        "group_id": 7,
        "policy_version": 3,
        "prompt": "2 + 2 = ?",
        "response": "4 …\u2028\n",
        "tokens": ["4", " …\u2028", "\n"],
        "token_entropy": [0.123456789, 0.0, 2.0],
        "shaped_rewards": [1.05, 1.0, 1.2],
        "advantages": [0.5, -0.25, 1e-9],
        "reward": 1.0,
        "truncated": False,
        "answer": "4",
    }
    return RolloutRecord(**(values | changes))


def write(folder, step, records):
    RolloutLog(folder, groups_per_step=2).write(step, records)
    ((_, path),) = rollout_files(folder)
    return path


def test_a_step_is_written_to_its_own_file_and_reads_back(tmp_path):
    records = [record(), record(reward=0.0, truncated=True, reward_failed=True)]
    path = write(tmp_path, 12, records)
    assert path == tmp_path / "rollouts" / "step_000012.jsonl"
    first, second = iter_rollouts(path)
    assert first.token_entropy == [0.123457, 0.0, 2.0]  # six significant digits
    assert first.advantages == [0.5, -0.25, 1e-9]
    assert (first.response, first.tokens, first.answer) == ("4 …\u2028\n", ["4", " …\u2028", "\n"], "4")
    assert (second.truncated, second.reward_failed, second.reward) == (True, True, 0.0)
    assert [json.loads(line)["step"] for line in path.read_text().split("\n")[:-1]] == [12, 12]


def test_parts_and_info_of_the_reward_read_back_and_are_not_written_without(tmp_path):
    info = '{"tests": ["passed", "timeout"]}'
    told = record(parts={"tests": 0.5, "missing": float("nan")}, info=info, problem_id="gsm8k/1")
    path = write(tmp_path, 1, [told, record()])
    first, second = iter_rollouts(path)
    assert (first.parts, first.info, first.problem_id) == ({"tests": 0.5}, info, "gsm8k/1")
    assert (second.parts, second.info) == ({}, "")
    assert not {"parts", "info", "problem_id"} & json.loads(path.read_text().split("\n")[1]).keys()


@pytest.mark.parametrize("wrong", [{"parts": [1]}, {"parts": {"a": "1"}}, {"info": {}}])
def test_malformed_parts_are_named(tmp_path, wrong):
    path = write(tmp_path, 1, [record()])
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong) + "\n")
    with pytest.raises(DataError, match=f"{next(iter(wrong))} is "):
        next(iter_rollouts(path))


def test_half_a_surrogate_pair_survives(tmp_path):
    path = write(tmp_path, 1, [record(response="\ud83d")])
    assert next(iter_rollouts(path)).response == "\ud83d"


@pytest.mark.parametrize("name", ["token_entropy", "shaped_rewards", "advantages"])
def test_padding_in_a_record_is_refused(name):
    with pytest.raises(DataError, match=f"{name} has 4 values for 3 tokens"):
        record(**{name: [0.0] * 4})


def test_groups_that_teach_come_first_and_order_is_kept(tmp_path):
    log = RolloutLog(tmp_path, groups_per_step=2)
    group_ids = [5, 5, 3, 3, 9, 9]
    assert log.choose(1, group_ids=group_ids, rewards=[1, 1, 0, 0, 1, 0]) == [5, 9]
    assert log.choose(1, group_ids=group_ids, rewards=[1, 1, 0, 1, 1, 0]) == [3, 9]
    assert log.choose(1, group_ids=group_ids, rewards=[1, 1, 0, 0, 1, 1]) == [5, 3]


def test_choosing_follows_the_cadence_and_zero_groups_means_none(tmp_path):
    log = RolloutLog(tmp_path, groups_per_step=1, every_steps=5)
    assert [step for step in range(1, 12) if log.choose(step, group_ids=[1], rewards=[1.0])] == [5, 10]
    assert RolloutLog(tmp_path, groups_per_step=0).choose(5, group_ids=[1], rewards=[1.0]) == []


def test_resuming_removes_the_files_of_later_steps(tmp_path):
    log = RolloutLog(tmp_path, groups_per_step=1)
    for step in (2, 10, 9):
        log.write(step, [record()])
    (tmp_path / "rollouts" / "step_000011.jsonl.tmp").write_text("half")  # a crash left it; it is not a step's file
    assert log.truncate_after(9) == 1
    assert [step for step, _ in rollout_files(tmp_path)] == [2, 9]


def test_a_run_without_texts_has_no_files(tmp_path):
    assert rollout_files(tmp_path) == []


def test_a_line_that_is_no_record_is_named(tmp_path):
    path = write(tmp_path, 1, [record()])
    with path.open("a", encoding="utf-8") as file:
        file.write('{"group_id": 7}\n')
    with pytest.raises(DataError, match=r"step_000001\.jsonl:2: not a rollout record"):
        list(iter_rollouts(path))


def test_a_full_disk_switches_the_log_off_and_training_goes_on(tmp_path, caplog):
    (tmp_path / "rollouts").write_text("a file where the folder should be")
    log = RolloutLog(tmp_path, groups_per_step=1)
    assert log.choose(1, group_ids=[1], rewards=[1.0]) == [1]
    log.write(1, [record()])
    assert log.failure is not None
    assert "training goes on" in caplog.text
    assert log.choose(2, group_ids=[1], rewards=[1.0]) == []


def test_what_is_not_finite_is_written_as_null_with_a_warning_and_not_read(tmp_path, caplog):
    log = RolloutLog(tmp_path, groups_per_step=1)
    for step in (1, 2):
        log.write(step, [record(advantages=[float("nan"), 0.5, float("inf")], reward=float("nan"))])
    row = json.loads((tmp_path / "rollouts" / "step_000001.jsonl").read_text(), parse_constant=pytest.fail)
    assert (row["advantages"], row["reward"]) == ([None, 0.5, None], None)
    assert caplog.text.count("not finite") == 1
    with pytest.raises(DataError, match=r"step_000001\.jsonl:1: not a rollout record .*advantages"):
        list(iter_rollouts(tmp_path / "rollouts" / "step_000001.jsonl"))


def test_stretches_of_foreign_tokens_are_written_and_read_back(tmp_path):
    assert foreign_spans([True, False, False, True, False]) == [(1, 3), (4, 5)]
    assert foreign_spans([True, True]) == foreign_spans([]) == []
    path = write(tmp_path, 1, [record(foreign_spans=[(0, 1), (2, 3)])])
    (found,) = iter_rollouts(path)
    assert found.foreign_spans == [[0, 1], [2, 3]]
    assert found.foreign_tokens == [0, 2]


@pytest.mark.parametrize("spans", [[(0, 9)], [(2, 1)], [(1, 2), (0, 1)], [(-1, 1)], [(1,)]])
def test_spans_outside_the_response_are_refused(spans):
    with pytest.raises(DataError, match="foreign_spans .* of 3 tokens"):
        record(foreign_spans=spans)


def test_branches_are_written_and_read_back_where_there_are_some(tmp_path):
    branches = (Branch(1, 0), Branch(2, -1))
    path = write(tmp_path, 1, [record(branches=branches), record()])
    assert ["branches" in json.loads(line) for line in path.read_text().split("\n")[:2]] == [True, False]
    assert [one.branches for one in iter_rollouts(path)] == [branches, ()]


@pytest.mark.parametrize("name", ["foreign_spans", "branches"])
@pytest.mark.parametrize("pairs", [3, [1], [[0, "1"]], [[0, 1.5]], {"0": 1}])
def test_pairs_of_another_type_are_refused(tmp_path, name, pairs):
    path = write(tmp_path, 1, [record()])
    row = json.loads(path.read_text()) | {name: pairs}
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=f"{name} is .*, expected pairs of integers"):
        list(iter_rollouts(path))


def test_branches_outside_the_response_are_refused(tmp_path):
    path = write(tmp_path, 1, [record()])
    path.write_text(json.dumps(json.loads(path.read_text()) | {"branches": [[9, 0]]}) + "\n")
    with pytest.raises(DataError, match=r"branches \[\(9, 0\)\] of a response of 3 tokens"):
        list(iter_rollouts(path))
