"""The recipes of SmolLM2: one setting, and a task whose held-out prompts are other ones."""

import dataclasses

import pytest

from gtpo_megatron.config.default_reward import run_with_default_reward
from gtpo_megatron.config.serialize import to_yaml
from gtpo_megatron.data.generated import generated_records
from recipes import smollm2_cpu, tiny_cpu
from tests.yaml_text import from_yaml


def test_recipes_differ_in_their_algorithm_only():
    base = smollm2_cpu.gtpo()
    for make in (smollm2_cpu.grpo, smollm2_cpu.grpo_s, smollm2_cpu.dapo):
        config = make()
        assert dataclasses.replace(config, name=base.name, algorithm=base.algorithm) == base
        assert config.name == f"smollm2_cpu_{make.__name__}"
        assert from_yaml(to_yaml(config)) == config


@pytest.mark.parametrize("module", [smollm2_cpu, tiny_cpu])
def test_adapters_differ_in_what_is_trained_and_its_rate_only(module):
    adapted = module.gtpo_lora()
    full = module.gtpo(num_steps=adapted.num_steps)
    assert adapted.adapter.is_on
    optimizer = dataclasses.replace(adapted.optimizer, learning_rate=full.optimizer.learning_rate)
    assert dataclasses.replace(adapted, name=full.name, adapter=full.adapter, optimizer=optimizer) == full
    assert from_yaml(to_yaml(adapted)) == adapted


def test_the_rows_grade_themselves():
    graded = run_with_default_reward(smollm2_cpu.gtpo())
    assert graded.reward.function == "gtpo_megatron.rewards.instructions:all_followed"
    assert graded.algorithm.success_threshold == 1


def test_few_held_out_prompts_are_trained_on():
    config = smollm2_cpu.gtpo()
    train, heldout = (
        {row["prompt"] for _, row in generated_records(ref.generated)}
        for ref in (config.data.train, config.heldout_sets["heldout"])
    )
    assert (len(train), len(heldout)) == (240, 256)
    assert len(train & heldout) <= 0.02 * len(heldout)
