"""``gtpo-megatron status``: its exit status and its JSON, for scripts."""

import json

import pytest

from gtpo_megatron.cli import dispatch
from gtpo_megatron.run_folder.folder import RunFolder
from recipes import tiny_cpu


@pytest.fixture
def run(tmp_path):
    """A running run whose metrics are given."""
    folder = RunFolder(tmp_path / "run")
    folder.open(tiny_cpu.gtpo(), resume=False)

    def measured(**metrics):
        rows = [{"step": 0, "eval/heldout_mean_at_k": 0.2}]
        rows += [{"step": step, "timing/step_s": 2.0, "rollout/groups_mixed_frac": 0.8, **metrics} for step in (1, 2)]
        (folder.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(folder.path)

    yield measured
    folder.close()


AMBER, RED = {"rollout/groups_mixed_frac": 0.2}, {"rollout/groups_mixed_frac": 0.0}


@pytest.mark.parametrize(
    ("metrics", "options", "expected"),
    [({}, [], 0), (AMBER, [], 0), (AMBER, ["--strict"], 3), (RED, [], 4), (RED, ["--strict", "--json"], 4)],
)
def test_a_script_can_tell_a_sound_run_from_a_sick_one(run, metrics, options, expected):
    assert dispatch.run(["status", run(**metrics), *options]) == expected


def test_signs_that_are_not_green_have_a_line_with_their_rule(run, capsys):
    dispatch.run(["status", run(**RED)])
    lines = capsys.readouterr().out.splitlines()
    assert "health      0 of 1 signs are green" in lines
    assert (
        "  red       groups without variance: 100% of the groups (last 5 steps: amber from 70%, red from 90%)" in lines
    )
    dispatch.run(["status", run()])
    assert "health      healthy: all 1 signs are green" in capsys.readouterr().out.splitlines()


def test_everything_as_one_json_object(run, capsys):
    dispatch.run(["status", run(**{"rollout/reward_mean": None, **AMBER}), "--json"])
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (found["state"], found["step"], found["num_steps"], found["step_s"]) == ("running", 2, 40, 2.0)
    assert found["last_row"] == {"step": 2.0, "timing/step_s": 2.0, "rollout/groups_mixed_frac": 0.2}
    assert found["health"]["level"] == "amber"
    (sign,) = found["health"]["signs"]
    assert sign["sign"] == "groups without variance"
    assert sign["anchor"] == "groups-without-variance"
