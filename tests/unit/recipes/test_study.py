from dataclasses import replace

import pytest

from gtpo_megatron.config.algorithm import GRPOConfig
from recipes.study import study

STUDY = study()


def test_the_six_arms_of_the_study_and_those_on_request():
    assert len(STUDY.default_arms) == 6
    assert {"gtpo_v1", "gtpo_v2", "entropy_advantage", "top_entropy", "gtpo_uniform", "gtpo_surprisal"} <= {
        arm.name for arm in STUDY.arms
    }
    assert (STUDY.num_seeds, STUDY.baseline) == (5, "grpo")


@pytest.mark.parametrize("arm", STUDY.arms, ids=lambda arm: arm.name)
def test_arms_differ_in_their_algorithm_and_nothing_else(arm):
    reference = STUDY.arm("grpo").recipe(num_steps=24, seed=3)
    config = arm.recipe(num_steps=24, seed=3)
    assert isinstance(reference.algorithm, GRPOConfig)
    assert replace(config, algorithm=reference.algorithm, name=reference.name) == reference
    assert (config.algorithm == reference.algorithm) == (arm.name == "grpo")
    assert not config.algorithm.dynamic_sampling.enabled  # else the budget is not the same


def test_no_two_arms_are_the_same():
    algorithms = [repr(arm.recipe(num_steps=2, seed=1).algorithm) for arm in STUDY.arms]
    assert len(set(algorithms)) == len(algorithms)


def test_the_task_is_the_harder_split_and_its_files_are_there():
    from pathlib import Path

    config = STUDY.arm("gtpo").recipe(num_steps=24, seed=0)
    for path in (config.data.train_path, config.evaluation.path):
        rows = Path(path).read_text(encoding="utf-8").splitlines()
        assert "hard" in path
        assert len(rows) > 200
    assert config.num_steps * config.data.prompts_per_step < 1993  # no prompt twice
