import pytest

from gtpo_megatron.errors import DataError
from gtpo_megatron.observability.run_folder import read_runs


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
    assert run.remarks == ()


def test_settings_are_read_by_path(tmp_path):
    (run,) = read_runs([_folder(tmp_path / "run")])
    assert run.setting("algorithm.kind") == "GTPOConfig"
    assert run.setting("algorithm.kind.deeper", "none") == "none"
    assert run.setting("rollout.group_size", 8) == 8


@pytest.mark.parametrize(
    ("files", "remark"),
    [
        ({"metrics": None}, "metrics.jsonl: no such file"),
        ({"metrics": '{"step": 1}\noops\n{"step": 2}\n'}, "metrics.jsonl:2: not JSON"),
        ({"config": None}, "config.yaml cannot be read"),
        ({"config": "a: [1"}, "config.yaml cannot be read"),
        ({"config": "just text"}, "config.yaml holds no settings"),
    ],
)
def test_what_cannot_be_read_is_remarked_and_the_rest_is_kept(tmp_path, files, remark):
    (run,) = read_runs([_folder(tmp_path / "run", **files)])
    assert len(run.remarks) == 1
    assert remark in run.remarks[0]
    assert bool(run.metrics) == ("metrics" not in files)
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
    assert (run.rollout_step, len(run.rollouts)) == (3, 1)
    assert "step_000004.jsonl:1" in run.remarks[0]
