import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.rewards.function import resolve_rewards
from gtpo_megatron.rewards.grade import checked
from gtpo_megatron.rewards.math_answer import math_answer


def test_a_function_is_found_by_module_and_name():
    [found] = resolve_rewards("gtpo_megatron.rewards.math_answer:math_answer")
    assert found.function is math_answer


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("math_answer", "module:function"),
        (":f", "module:function"),
        ("m:", "module:function"),
        ("no_such_module_at_all:f", "there is no module 'no_such_module_at_all'"),
        ("tests.unit.rewards.reward_functions:ecko", "it has .*echo"),
        ("tests.unit.rewards.reward_functions:NOT_A_FUNCTION", "it has .*echo"),
    ],
)
def test_a_wrong_name_says_what_is_wrong(name, complaint):
    with pytest.raises(ConfigError, match=complaint):
        resolve_rewards(name)


def test_a_module_that_raises_on_import_is_a_config_error(tmp_path, monkeypatch):
    (tmp_path / "broken_reward_module.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        resolve_rewards("broken_reward_module:f")


@pytest.mark.parametrize(
    "returned",
    [
        math.nan,
        math.inf,
        pytest.param(10**400, id="a number too large"),
        None,
        "1",
        1j,
        [1.0],
        np.float32("nan"),
        np.str_("1"),
        np.array([1.0, 2.0]),
        torch.tensor([1.0, 2.0]),
    ],
    ids=repr,
)
def test_only_a_finite_number_is_a_reward(returned):
    with pytest.raises(DataError, match="expected a finite number"):
        checked(returned)


@pytest.mark.parametrize(
    ("returned", "reward"),
    [
        (2, 2.0),
        (True, 1.0),
        (Fraction(1, 2), 0.5),
        (np.float32(0.5), 0.5),
        (np.float64(-1), -1.0),
        (np.int64(1), 1.0),
        (np.True_, 1.0),
        (torch.tensor(0.25), 0.25),
    ],
    ids=repr,
)
def test_any_single_number_is_a_reward(returned, reward):
    found = checked(returned).value
    assert (type(found), found) == (float, reward)
