import dataclasses

import pytest

from gtpo_megatron.config.output import CheckpointConfig, ProfileConfig
from gtpo_megatron.config.serialize import load_any, load_config, to_yaml
from gtpo_megatron.config.sft import ConversationData
from gtpo_megatron.errors import ConfigError
from recipes import tiny_cpu


def test_a_profile_is_checked_once_the_steps_of_epochs_are_known():
    profile = ProfileConfig(tool="torch", first_step=5)
    config = dataclasses.replace(tiny_cpu.sft(), num_steps=0, num_epochs=1, profile=profile)
    assert config.of_ranks().num_steps == 1
    assert config.with_steps(1024).of_ranks().profile == profile
    with pytest.raises(ConfigError, match="profile"):
        config.with_steps(64)


def test_it_is_read_back_as_it_was_written(tmp_path):
    config = tiny_cpu.sft_lora()
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert load_any(tmp_path / "config.yaml") == config
    with pytest.raises(ConfigError, match=r"config.yaml is of a warm start \(gtpo-megatron sft\); expected"):
        load_config(tmp_path / "config.yaml")
    run = tiny_cpu.gtpo()
    (tmp_path / "config.yaml").write_text(to_yaml(run), encoding="utf-8")
    assert load_any(tmp_path / "config.yaml") == run


@pytest.mark.parametrize(("num_steps", "num_epochs"), [(0, 0), (3, 1)])
def test_steps_or_epochs_say_how_long(num_steps, num_epochs):
    with pytest.raises(ConfigError, match=f"num_steps={num_steps} with num_epochs={num_epochs}: one of them says"):
        dataclasses.replace(tiny_cpu.sft(), num_steps=num_steps, num_epochs=num_epochs)


def test_epochs_become_steps_once_the_rows_are_known():
    config = dataclasses.replace(tiny_cpu.sft(), num_steps=0, num_epochs=3)
    found = config.with_steps(33)  # of 32 a step
    assert (found.num_steps, found.num_epochs) == (4, 0)
    assert tiny_cpu.sft().with_steps(33) == tiny_cpu.sft()


def test_ranks_have_the_model_layout_and_optimizer_of_the_warm_start():
    config = tiny_cpu.sft_lora()
    ranks = config.of_ranks()
    for name in ("model", "optimizer", "parallel", "adapter", "checkpoint", "logging", "cluster", "seed", "num_steps"):
        assert getattr(ranks, name) == getattr(config, name)
    assert ranks.update.micro_batch_tokens == config.micro_batch_tokens
    assert ranks.rollout.sampling.temperature == 1.0  # by which the head divides logits
    assert ranks.num_updates == config.num_steps
    assert not ranks.has_reference


def test_what_ranks_cannot_do_is_refused():
    with pytest.raises(ConfigError, match="cluster.mode='local' runs one rank"):
        dataclasses.replace(tiny_cpu.sft(), cluster=dataclasses.replace(tiny_cpu.sft().cluster, mode="local"))
    with pytest.raises(ConfigError, match="keep_best=1: a warm start measures a loss only"):
        dataclasses.replace(tiny_cpu.sft(), checkpoint=CheckpointConfig(keep_best=1))


def test_columns_are_those_of_both_sets():
    data = ConversationData(train_path="a.jsonl", heldout_path="b.jsonl", prompt_column="q", completion_column="w")
    assert data.heldout is not None
    for found in (data.train, data.heldout):
        assert (found.prompt_column, found.answer_column) == ("q", "w")
    assert ConversationData(train_path="a.jsonl").heldout is None
