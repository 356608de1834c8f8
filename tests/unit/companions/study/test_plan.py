from dataclasses import replace

import pytest

from gtpo_megatron.companions.study.controls import ControlConfig
from gtpo_megatron.companions.study.plan import (
    Needed,
    PlannedComparison,
    fingerprint,
    has_settings,
    planned_runs,
    portable,
    require_needed,
)
from gtpo_megatron.config.serialize import to_plain
from gtpo_megatron.errors import ConfigError
from tests.unit.companions.study.makers import STUDY


def test_every_arm_has_a_seed_before_any_has_two():
    runs = planned_runs(STUDY, ("gtpo", "grpo"), num_seeds=2, num_steps=3)
    assert [run.name for run in runs] == ["gtpo_seed0", "grpo_seed0", "gtpo_seed1", "grpo_seed1"]
    assert [(run.config.seed, run.config.num_steps) for run in runs] == [(0, 3), (0, 3), (1, 3), (1, 3)]


def test_an_arm_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(ConfigError, match="arm 'ppo': the study .* has gtpo, gtpo_alpha2_0"):
        planned_runs(STUDY, ("ppo",), num_seeds=1, num_steps=3)
    with pytest.raises(ConfigError, match="num_seeds=0"):
        planned_runs(STUDY, ("gtpo",), num_seeds=0, num_steps=3)
    with pytest.raises(ConfigError, match="arm 'ppo'"):
        replace(STUDY, baseline="ppo")
    with pytest.raises(ConfigError, match="two have the same name"):
        replace(STUDY, arms=(*STUDY.arms, STUDY.arms[0]))


def test_seeds_begin_where_the_study_says():
    runs = planned_runs(replace(STUDY, first_seed=100), ("gtpo",), num_seeds=2, num_steps=3)
    assert [(run.name, run.config.seed) for run in runs] == [("gtpo_seed100", 100), ("gtpo_seed101", 101)]
    with pytest.raises(ConfigError, match="first_seed=-1"):
        replace(STUDY, first_seed=-1)


def test_a_run_too_short_for_the_outcome_is_refused():
    study = replace(STUDY, num_steps=10, outcome_steps=5)
    with pytest.raises(ConfigError, match="num_steps=4: the outcome of the study .* is a mean over the last 5 steps"):
        planned_runs(study, ("gtpo",), num_seeds=1, num_steps=4)
    assert planned_runs(study, ("gtpo",), num_seeds=1, num_steps=5)


def test_planned_comparisons_and_doses_are_of_arms_that_there_are():
    with pytest.raises(ConfigError, match="arm 'ppo'"):
        replace(STUDY, comparisons=(PlannedComparison(method="gtpo", baseline="ppo"),))
    with pytest.raises(ConfigError, match="arm 'ppo'"):
        replace(STUDY, dose=(("ppo", 0.1),))


def test_what_is_needed_is_named_with_the_command_that_makes_it(tmp_path):
    needed = Needed(path=str(tmp_path / "model"), command="make-it --now")
    with pytest.raises(ConfigError, match="model is not there.*make it: make-it --now"):
        require_needed(replace(STUDY, needed=(needed,)))
    (tmp_path / "model").touch()
    require_needed(replace(STUDY, needed=(needed,)))


def test_fingerprints_are_of_settings_and_not_of_folders():
    (run,) = planned_runs(STUDY, ("gtpo",), num_seeds=1, num_steps=3)
    config = run.config
    moved = replace(config, model=replace(config.model, path="/elsewhere/tiny_qwen2"))
    assert fingerprint(moved) == fingerprint(config)
    assert fingerprint(replace(config, model=replace(config.model, path="/elsewhere/other"))) != fingerprint(config)
    assert fingerprint(replace(config, seed=1)) != fingerprint(config)
    assert portable({"a": ["/x/y", "x/y", 1.5, None]}) == {"a": ["y", "x/y", 1.5, None]}


def test_a_run_from_before_an_option_had_its_default():
    (run,) = planned_runs(STUDY, ("gtpo",), num_seeds=1, num_steps=3)
    config, plain = run.config, portable(to_plain(run.config))
    assert has_settings(plain, config)
    older = plain | {
        "rollout": {name: value for name, value in plain["rollout"].items() if name != "max_engine_restarts"}
    }
    assert has_settings(older, config)
    assert not has_settings(older, replace(config, rollout=replace(config.rollout, max_engine_restarts=2)))
    judge = plain["reward"]["judge"]
    unasked = plain | {"reward": plain["reward"] | {"judge": judge | {"score_pattern": "(x)"}}}
    assert has_settings(unasked, config)
    for other in (
        plain | {"reward": plain["reward"] | {"judge": judge | {"url": "http://h/v1"}}},
        plain | {"gone": 1},
        plain | {"seed": 9},
        plain | {"rollout": plain["rollout"] | {"gone": 1}},
        plain | {"rollout": None},
        plain | {"algorithm": plain["algorithm"] | {"kind": "GRPOConfig"}},
        plain | {"algorithm": plain["algorithm"] | {"weight_source": "shuffled"}},
        {name: value for name, value in plain.items() if name != "model"},
    ):
        assert not has_settings(other, config)


def test_a_run_of_a_control_from_before_it_had_a_class_of_its_own():
    (run,) = planned_runs(STUDY, ("gtpo",), num_seeds=1, num_steps=3)
    plain = portable(to_plain(run.config))
    unused = {"weight_source": "entropy", "weight_seed": 0, "shaped_sides": "both"}
    shuffled = unused | {"weight_source": "shuffled", "weight_seed": 3}
    control = replace(run.config, algorithm=ControlConfig(weight_source="shuffled", weight_seed=3))
    other = replace(run.config, algorithm=ControlConfig(weight_source="shuffled"))
    assert has_settings(plain | {"algorithm": plain["algorithm"] | unused}, run.config)
    assert has_settings(plain | {"algorithm": plain["algorithm"] | shuffled}, control)
    assert not has_settings(plain | {"algorithm": plain["algorithm"] | shuffled}, other)
