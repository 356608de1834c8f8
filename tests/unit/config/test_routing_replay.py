"""Routing replay that a model or its engine cannot do is refused."""

import dataclasses

import pytest

from gtpo_megatron import train
from gtpo_megatron.config.model import ModelConfig
from gtpo_megatron.config.optimizer import UpdateConfig
from gtpo_megatron.config.rollout import RolloutConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.rollout import engine_checks
from gtpo_megatron.weights.config_json import read_architecture
from recipes import tiny_cpu
from tests.unit.weights.test_architecture import written
from tests.unit.weights.test_qwen3_next import QWEN3_NEXT_80B


@pytest.mark.parametrize("source", ["score", "rollout"])
def test_a_dense_model_has_no_routers(source):
    with pytest.raises(ConfigError, match=f"update.routing_replay='{source}': this model is dense"):
        UpdateConfig(routing_replay=source).check_dense()
    UpdateConfig().check_dense()


def test_a_dense_model_has_no_experts_to_make_again():
    with pytest.raises(ConfigError, match="model.recompute='experts': this model is dense"):
        ModelConfig(path="m", recompute="experts").check_dense()
    ModelConfig(path="m", recompute="full").check_dense()


def test_another_source_is_refused():
    with pytest.raises(ConfigError, match="routing_replay"):
        UpdateConfig(routing_replay="both")


def test_an_engine_of_delta_nets_returns_no_routing_on_gpus(tmp_path, monkeypatch):
    """vLLM asks for a prefix cache there, in the engine's process."""
    folder = written(tmp_path, QWEN3_NEXT_80B)
    arch = read_architecture(folder)
    engine_checks.check_split(arch, RolloutConfig(), on_gpus=True)
    engine_checks.check_split(arch, RolloutConfig(returns_routing=True), on_gpus=False)
    refused = "rollout.returns_routing=True: .* a prefix cache, .* update.routing_replay='score'"
    with pytest.raises(ConfigError, match=refused):
        engine_checks.check_split(arch, RolloutConfig(returns_routing=True), on_gpus=True)
    config = tiny_cpu.moe_gtpo()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(folder)))
    monkeypatch.setattr(engine_checks, "is_cpu_build", lambda: False)
    with pytest.raises(ConfigError, match=refused):
        train.check_inputs(config)
