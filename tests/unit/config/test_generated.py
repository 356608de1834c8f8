"""Names of generated data sets, and the reward that goes with them."""

from dataclasses import replace

import pytest

from gtpo_megatron.config.default_reward import evaluation_with_default_reward, run_with_default_reward
from gtpo_megatron.config.evaluate import EvaluateConfig, defaults_of_run
from gtpo_megatron.config.generated import MAX_SIZE, GeneratedSet, own_reward, shares
from gtpo_megatron.config.problems import parse_dataset, parse_datasets
from gtpo_megatron.errors import ConfigError
from recipes import tiny_cpu

SUM = GeneratedSet(generator="reasoning-gym", task="chain_sum")
GYM_REWARD = "gtpo_megatron.rewards.reasoning_gym:task_score"
MATH_REWARD = "gtpo_megatron.rewards.math_answer:math_answer"


@pytest.mark.parametrize(
    ("text", "expected", "label"),
    [
        ("reasoning-gym:chain_sum", (SUM,), "chain_sum"),
        (
            " reasoning-gym:chain_sum?min_terms=2&size=2000&seed=3 ",
            (replace(SUM, size=2000, seed=3, options=(("min_terms", "2"),)),),
            "chain_sum",
        ),
        (
            'reasoning-gym:complex_arithmetic?operations=["%2B","-"]',
            (
                GeneratedSet(
                    generator="reasoning-gym", task="complex_arithmetic", options=(("operations", '["+","-"]'),)
                ),
            ),
            "complex_arithmetic",
        ),
        ("instructions", (GeneratedSet(generator="instructions"),), "instructions"),
        (
            "reasoning-gym:chain_sum?weight=2+reasoning-gym:gcd?size=10",
            (replace(SUM, weight=2.0), GeneratedSet(generator="reasoning-gym", task="gcd", size=10)),
            "chain_sum_gcd",
        ),
        (
            "easy=instructions?kinds=json;title",
            (GeneratedSet(generator="instructions", options=(("kinds", "json;title"),)),),
            "easy",
        ),
    ],
)
def test_the_forms_of_a_name(text, expected, label):
    found = parse_dataset(text, "train_path")
    assert (found.generated, found.label) == (expected, label)
    assert parse_dataset(str(found), "train_path") == found


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("reasoning-gym", "expected reasoning-gym:NAME"),
        ("reasoning-gym:?size=3", "expected reasoning-gym:NAME"),
        ("reasoning-gym:gcd + lcm", "expected reasoning-gym:NAME"),
        ("reasoning-gym:gcd?size=0", "size='0' must be a whole number from 1 to 1000000"),
        ("reasoning-gym:gcd?size=1e3", "size='1e3' must be"),
        ("reasoning-gym:gcd?seed=-1", "seed='-1' must be a whole number from 0"),
        ("reasoning-gym:gcd?weight=0", "weight='0' must be a number above 0"),
        ("reasoning-gym:gcd?weight=nan", "weight='nan' must be"),
        ("reasoning-gym:gcd?weight=1e308", "of at most 1,000,000"),
        ("reasoning-gym:gcd?min_value", "'min_value' is no option; expected NAME=VALUE"),
        ("reasoning-gym:gcd?size=3&size=4", "size is given twice"),
        ("instructions:json", "instructions has no parts"),
        ("instructions + reasoning-gym:gcd", "graded differently"),
    ],
)
def test_what_is_no_name(text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse_dataset(text, "train_path")


def test_one_task_twice_needs_names():
    easy, hard = "reasoning-gym:gcd?max_value=9", "reasoning-gym:gcd"
    with pytest.raises(ConfigError, match="share the name 'gcd'"):
        parse_datasets((easy, hard), "benchmarks")
    assert [ref.label for ref in parse_datasets((f"easy={easy}", hard), "benchmarks")] == ["easy", "gcd"]


@pytest.mark.parametrize("weight", ["2", "0.1", "0.123456789", "1e-7"])
def test_a_weight_is_written_out_as_it_is(weight):
    found = parse_dataset(f"reasoning-gym:gcd?weight={weight}", "train_path")
    assert parse_dataset(str(found), "train_path") == found


def test_sizes_are_shared_out_by_weights():
    two = replace(SUM, size=1000)
    assert shares([two, replace(SUM, size=500)]) == (1000, 500)
    assert shares([replace(two, weight=2.0), replace(SUM, size=500)]) == (1000, 500)
    assert shares([replace(two, weight=1.0), replace(SUM, size=500)]) == (750, 750)
    assert shares([replace(SUM, size=10, weight=1e9), replace(SUM, size=10)]) == (20, 1)


def test_rows_of_two_seeds_have_no_random_numbers_in_common():
    one, other = replace(SUM, seed=1), replace(SUM, seed=2)
    assert other.first_seed - one.first_seed == MAX_SIZE


def test_rows_of_one_generator_have_a_reward_of_their_own():
    instructions = GeneratedSet(generator="instructions")
    assert own_reward([(SUM,), (SUM, SUM)]) == GYM_REWARD
    assert own_reward([(instructions,)]) == "gtpo_megatron.rewards.instructions:all_followed"
    assert own_reward([(SUM,), ()]) == own_reward([(SUM,), (instructions,)]) == own_reward([]) == ""


def run_on(path, **reward):
    run = tiny_cpu.gtpo()
    return replace(run, data=replace(run.data, train_path=path), reward=replace(run.reward, **reward))


def test_a_run_on_tasks_takes_their_scorer_and_its_threshold():
    run = run_with_default_reward(run_on("reasoning-gym:chain_sum"))
    assert (run.reward.function, run.algorithm.success_threshold) == (GYM_REWARD, 1.0)
    assert run_with_default_reward(run) == run
    evaluation = defaults_of_run(
        replace(run, evaluation=replace(run.evaluation, path="reasoning-gym:chain_sum?seed=1"))
    )
    assert list(evaluation.sets) == ["heldout"]
    assert (evaluation.reward.function, evaluation.success_threshold) == (GYM_REWARD, 1.0)


def test_another_reward_or_other_rows_stay_as_they_are():
    for run in (run_on("train.jsonl"), run_on("reasoning-gym:gcd", function="mine:f")):
        assert run_with_default_reward(run) == run


def test_an_evaluation_on_tasks_takes_their_scorer():
    config = evaluation_with_default_reward(EvaluateConfig(benchmarks=("reasoning-gym:gcd,reasoning-gym:lcm",)))
    assert (config.reward.function, config.success_threshold) == (GYM_REWARD, 1.0)
    mixed = EvaluateConfig(benchmarks=("reasoning-gym:gcd", "aime24"))
    assert evaluation_with_default_reward(mixed).reward.function == MATH_REWARD
