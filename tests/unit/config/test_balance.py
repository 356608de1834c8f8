"""What balances experts is refused for models that have no use for it."""

import pytest

from gtpo_megatron.config.model import BalanceConfig
from gtpo_megatron.errors import ConfigError


def test_everything_is_off():
    BalanceConfig().check_model(has_experts=False, has_bias=False)
    assert not BalanceConfig().has_penalties


@pytest.mark.parametrize("name", ["aux_loss_coef", "z_loss_coef", "bias_update_rate"])
def test_a_dense_model_and_negative_numbers_are_refused(name):
    with pytest.raises(ConfigError, match=rf"balance.{name}=0.1: the model is dense; set it to 0"):
        BalanceConfig(**{name: 0.1}).check_model(has_experts=False, has_bias=False)
    with pytest.raises(ConfigError, match=rf"{name}=-0.1: must be greater than or equal to 0"):
        BalanceConfig(**{name: -0.1})


def test_biases_that_are_not_there_are_not_updated():
    BalanceConfig(aux_loss_coef=0.1).check_model(has_experts=True, has_bias=False)
    BalanceConfig(bias_update_rate=0.1).check_model(has_experts=True, has_bias=True)
    with pytest.raises(ConfigError, match="balance.bias_update_rate=0.1: the experts of this model have no biases"):
        BalanceConfig(bias_update_rate=0.1).check_model(has_experts=True, has_bias=False)
