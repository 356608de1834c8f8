from dataclasses import replace

import pytest

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.study.plan import fingerprint, planned_runs, portable
from tests.unit.study.makers import STUDY


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


def test_fingerprints_are_of_settings_and_not_of_folders():
    (run,) = planned_runs(STUDY, ("gtpo",), num_seeds=1, num_steps=3)
    config = run.config
    moved = replace(config, model=replace(config.model, path="/elsewhere/tiny_qwen2"))
    assert fingerprint(moved) == fingerprint(config)
    assert fingerprint(replace(config, model=replace(config.model, path="/elsewhere/other"))) != fingerprint(config)
    assert fingerprint(replace(config, seed=1)) != fingerprint(config)
    assert portable({"a": ["/x/y", "x/y", 1.5, None]}) == {"a": ["y", "x/y", 1.5, None]}
