import pytest

from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.rewards.function import graded, resolve_reward
from gtpo_megatron.rewards.math_answer import math_answer
from tests.unit.rewards import reward_functions


def test_a_function_is_found_by_module_and_name():
    assert resolve_reward("gtpo_megatron.rewards.math_answer:math_answer") is math_answer


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("math_answer", "module:function"),
        (":f", "module:function"),
        ("m:", "module:function"),
        ("no_such_module_at_all:f", "importing no_such_module_at_all failed"),
        ("tests.unit.rewards.reward_functions:ecko", "it has .*echo"),
        ("tests.unit.rewards.reward_functions:NOT_A_FUNCTION", "it has .*echo"),
    ],
)
def test_a_wrong_name_says_what_is_wrong(name, complaint):
    with pytest.raises(ConfigError, match=complaint):
        resolve_reward(name)


def test_a_module_that_raises_on_import_is_a_config_error(tmp_path, monkeypatch):
    (tmp_path / "broken_reward_module.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        resolve_reward("broken_reward_module:f")


@pytest.mark.parametrize("response", ["nan", "none", "text"])
def test_only_a_finite_number_is_a_reward(response):
    with pytest.raises(DataError, match="expected a finite number"):
        graded(reward_functions.returns, response, "")


def test_whole_numbers_and_truth_are_rewards():
    assert graded(reward_functions.returns, "two", "") == 2.0
    assert graded(reward_functions.returns, "true", "") == 1.0
