"""Which summaries a study takes for its own: by settings, whatever else lies in its folders."""

from dataclasses import replace

import pytest

from gtpo_megatron.companions.study.finished import find_runs, progress
from gtpo_megatron.companions.study.page import write_results
from gtpo_megatron.companions.study.plan import MAX_SEED, digest, planned_runs
from gtpo_megatron.companions.study.run_summary import outcomes
from gtpo_megatron.companions.study.runs_file import append_run
from gtpo_megatron.companions.study.table import legend
from gtpo_megatron.errors import ConfigError
from tests.unit.companions.study.makers import STUDY, summaries

ARMS = ("gtpo", "grpo")


@pytest.fixture
def found(tmp_path):
    """Three seeds of two arms, four steps each."""
    return summaries(planned_runs(STUDY, ARMS, num_seeds=3, num_steps=4), tmp_path / "made")


def put(folder, *runs):
    for run in runs:
        append_run(folder, run)


def stale(run, **changes):
    """A run of other settings."""
    config = run.config | {"seed": 123_456}
    return replace(run, config=config, fingerprint=digest(config), **changes)


def names(runs):
    return [run.name for run in runs]


def test_other_settings_hide_no_run_of_a_later_folder(tmp_path, found):
    own, shared = tmp_path / "own", tmp_path / "shared"
    put(own, stale(found[0]), *found[1:3])
    put(shared, *found)
    seen = find_runs(STUDY, [own, shared], num_steps=4)
    assert sorted(names(seen.runs)) == sorted(names(found))
    assert (seen.own, seen.others) == (set(names(found[1:3])), set())


def test_what_has_other_settings_only_is_named_wherever_it_lies(tmp_path, found):
    own, shared = tmp_path / "own", tmp_path / "shared"
    put(own, found[0], stale(found[0], arm="of_another_study"))
    put(shared, stale(found[1]), stale(found[1], arm="of_another_study", seed=7))
    seen = find_runs(STUDY, [own, shared], num_steps=4)
    assert names(seen.runs) == [found[0].name]
    assert seen.others == {"of_another_study_seed0", found[1].name}
    said = write_results(STUDY, [own, shared], tmp_path / "runs", num_steps=4, suffix="")
    assert said.startswith("1 runs (2 with other settings left out): ")


def test_seeds_of_other_settings_are_not_the_studys(tmp_path, found):
    own, shared = tmp_path / "own", tmp_path / "shared"
    put(own, *[run for run in found if run.arm == "gtpo" and run.seed < 2], stale(found[0], seed=9_999))
    put(shared, *[run for run in found if run.arm == "grpo"])
    write_results(STUDY, [own, shared], tmp_path / "runs", num_steps=4, suffix="")
    table = (own / "table.md").read_text()
    assert "| GTPO v6 | 2 |" in table
    assert "| GRPO | 2 |" in table


def test_minutes_are_those_of_the_runs_that_are_done(tmp_path, found):
    own, shared = tmp_path / "own", tmp_path / "shared"
    put(own, found[0])
    put(shared, *found[:2])
    runs = planned_runs(STUDY, ARMS, num_seeds=3, num_steps=4)
    minutes = sum(run.cost["training_s"] for run in found[:2]) / 60
    assert f"2 of 6 runs are done, 4 are missing; those done trained for {minutes:.0f} " in progress(
        runs, [own, shared]
    )


@pytest.mark.parametrize("num_seeds", [0, MAX_SEED + 2])
def test_no_run_has_a_seed_whose_summary_would_be_refused(num_seeds):
    with pytest.raises(ConfigError, match=f"num_seeds={num_seeds}: must be from 1 to {MAX_SEED + 1}"):
        planned_runs(STUDY, ARMS, num_seeds=num_seeds, num_steps=4)
    with pytest.raises(ConfigError, match=f"first_seed=.*from 0 to {MAX_SEED}"):
        replace(STUDY, first_seed=MAX_SEED + 1)


def test_an_outcome_that_nobody_measured_is_named(tmp_path, found):
    put(tmp_path, *found)
    plan = replace(STUDY, outcome="rollout/nothing")
    said = write_results(plan, [tmp_path], tmp_path / "runs", num_steps=4, suffix="")
    assert said == f"none of 6 finished runs in {tmp_path} has measured rollout/nothing at the last step"


def test_an_outcome_is_that_of_the_last_step_or_steps(found):
    curve = {"eval/heldout_mean_at_k": [(0, 0.2)]}
    early = replace(found[0], curves=found[0].curves | curve)
    assert outcomes(STUDY, [early, *found[2:4]], found[0].arm).keys() == {1}
    rewards = replace(STUDY, outcome="rollout/reward_mean", outcome_steps=3)
    curve = {"rollout/reward_mean": [(1, 0.9), (2, 0.1), (3, 0.2), (4, 0.6)]}
    whole, gap = (replace(found[0], curves={key: points[start:]}) for key, points in curve.items() for start in (0, 2))
    assert outcomes(rewards, [whole], whole.arm) == {whole.seed: pytest.approx(0.3)}
    assert outcomes(rewards, [gap], gap.arm) == {}
    assert "Outcome: rollout/reward_mean in the mean over the last 3 steps" in legend(rewards)
    with pytest.raises(ConfigError, match="outcome_steps=25: must be from 1 to num_steps"):
        replace(STUDY, outcome_steps=25)


def test_an_arm_that_is_asked_for_twice_is_run_once():
    runs = planned_runs(STUDY, ("gtpo", "grpo", "gtpo"), num_seeds=2, num_steps=4)
    assert names(runs) == ["gtpo_seed0", "grpo_seed0", "gtpo_seed1", "grpo_seed1"]


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "a\nb"])
def test_an_arm_has_a_name_for_files(name):
    arm = replace(STUDY.arms[0], name=name)
    with pytest.raises(ConfigError, match="its name is that of files and folders"):
        replace(STUDY, arms=(arm, *STUDY.arms[1:]))


def test_a_recipe_that_fails_is_named_by_its_arm():
    def fails(**_):
        return {}["no such key"]

    study = replace(STUDY, arms=(replace(STUDY.arms[0], recipe=fails), *STUDY.arms[1:]))
    with pytest.raises(ConfigError, match=f"arm '{STUDY.arms[0].name}': it raised KeyError"):
        planned_runs(study, (STUDY.arms[0].name,), num_seeds=1, num_steps=4)
