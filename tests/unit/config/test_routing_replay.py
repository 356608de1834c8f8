"""Routing replay of a dense model is refused."""

import pytest

from gtpo_megatron.config.model import ModelConfig
from gtpo_megatron.config.optimizer import UpdateConfig
from gtpo_megatron.errors import ConfigError


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
