from itertools import pairwise

import pytest

from gtpo_megatron.companions.report.run_data import read_runs
from gtpo_megatron.errors import DataError
from gtpo_megatron.run_folder.metrics_file import read_what_there_is
from gtpo_megatron.run_folder.rollout_log import RolloutLog
from tests.unit.companions.report.run_folders import response


def _folder(
    path, *, metrics='{"step": 1, "policy/loss": 0.5}\n', config="num_steps: 4\nalgorithm: {kind: GTPOConfig}\n"
):
    path.mkdir(parents=True)
    if metrics is not None:
        (path / "metrics.jsonl").write_text(metrics)
    if config is not None:
        (path / "config.yaml").write_text(config)
    return path


def test_series_leave_out_what_is_missing_or_not_a_number(tmp_path):
    lines = (
        '{"step": 0, "a/b": 1}\n{"step": 1, "a/b": null}\n{"step": 2}\n{"step": 4, "a/b": 2.5}\n{"step": 5, "a/b": 9'
    )
    (run,) = read_runs([_folder(tmp_path / "run", metrics=lines)])
    assert run.series("a/b") == ([0, 4], [1.0, 2.5])
    assert run.series("a/c") == ([], [])
    assert run.num_steps_done == 4
    assert len(run.remarks) == 1  # the cut line


def test_settings_are_read_by_path(tmp_path):
    (run,) = read_runs([_folder(tmp_path / "run")])
    assert run.setting("algorithm.kind") == "GTPOConfig"
    assert run.setting("algorithm.kind.deeper", "none") == "none"
    assert run.setting("rollout.group_size", 8) == 8


@pytest.mark.parametrize(
    ("files", "remark"),
    [
        ({"metrics": None}, "metrics.jsonl: no such file"),
        ({"metrics": '{"step": 1}\noops\n{"step": 2}\n'}, "metrics.jsonl:2: not valid JSON"),
        ({"config": None}, "config.yaml: cannot be read: no such file, so the run's settings are not shown"),
        ({"config": "a: [1"}, "config.yaml: not valid YAML"),
        ({"config": "just text"}, "config.yaml holds no settings"),
    ],
)
def test_what_cannot_be_read_is_remarked_and_the_rest_is_kept(tmp_path, files, remark):
    (run,) = read_runs([_folder(tmp_path / "run", **files)])
    assert len(run.remarks) == 1
    assert remark in run.remarks[0]
    assert [row["step"] for row in run.metrics] == ([] if files.get("metrics", "") is None else [1])
    assert bool(run.config) == ("config" not in files)


def test_runs_of_one_name_are_told_apart_by_their_parents(tmp_path):
    folders = [_folder(tmp_path / "a" / "gtpo"), _folder(tmp_path / "b" / "gtpo"), _folder(tmp_path / "b" / "grpo")]
    assert [run.name for run in read_runs(folders)] == ["a/gtpo", "b/gtpo", "grpo"]
    assert len({run.name for run in read_runs([folders[0], folders[0]])}) == 2


def test_no_folder_and_a_wrong_folder_are_errors(tmp_path):
    with pytest.raises(DataError, match="at least one"):
        read_runs([])
    with pytest.raises(DataError, match="no such run folder"):
        read_runs([tmp_path / "typo"])


def test_unreadable_texts_of_the_last_step_give_way_to_the_ones_before(tmp_path):
    folder = _folder(tmp_path / "run")
    (folder / "rollouts").mkdir()
    good = (
        '{"group_id": 1, "policy_version": 0, "prompt": "p", "response": "r", "tokens": ["r"], "token_entropy": [0.1], '
        '"shaped_rewards": [1], "advantages": [1], "reward": 1.0, "truncated": false, "from_a_newer_version": 1}\n'
    )
    (folder / "rollouts" / "step_000003.jsonl").write_text(good)
    (folder / "rollouts" / "step_000004.jsonl").write_text("garbage\n")
    (run,) = read_runs([folder])
    assert [(group.step, len(group.responses)) for group in run.groups] == [(3, 1)]
    assert "step_000004.jsonl:1" in run.remarks[0]


def test_sampled_groups_come_from_all_over_the_run(tmp_path):
    folder = _folder(tmp_path / "run")
    log = RolloutLog(folder, groups_per_step=2)
    for step in range(1, 201):
        log.write(step, [response(2 * step, 1.0), response(2 * step + 1, 0.0), response(2 * step, 0.0)])
    (run,) = read_runs([folder])
    steps = [group.step for group in run.groups]
    assert len(steps) == 64
    assert (steps[0], steps[-1]) == (1, 200)
    assert steps == sorted(steps)
    assert max(later - earlier for earlier, later in pairwise(steps)) <= 10
    assert [len(group.responses) for group in run.groups[:2]] == [2, 1]
    log.write(200, [response(label, 1.0) for label in range(100)])
    assert [group.step for group in read_runs([folder])[0].groups] == [200] * 64


def test_a_cut_or_broken_metrics_file_is_read_up_to_there(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_what_there_is(path) == (
        [{"step": 1}, {"step": 2}],
        f"{path} ends in mid-line 3 (a crash, or a line being written). Read up to there.",
    )
    path.write_text('{"step": 1}\n[]\n{"step": 3}\n')
    rows, remark = read_what_there_is(path)
    assert rows == [{"step": 1}]
    assert "metrics.jsonl:2" in remark
    assert "1 of 3 lines" in remark
    path.write_text('{"step": 1}\n')
    assert read_what_there_is(path) == ([{"step": 1}], "")
