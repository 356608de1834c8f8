from dataclasses import replace

import pytest

from gtpo_megatron.config.algorithm import GTPOConfig
from gtpo_megatron.config.environment import EnvironmentConfig
from gtpo_megatron.config.evaluate import EvaluateConfig
from gtpo_megatron.errors import ConfigError
from recipes import tiny_cpu


def test_there_is_no_environment_unless_it_is_named():
    config = EnvironmentConfig()
    assert config.name == ""
    assert config.discount == 1.0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"name": "calculator"}, "must be written module:Name or FILE.py:Name"),
        ({"discount": 1.5}, "discount=1.5: must lie between 0 and 1"),
        ({"num_workers": 0}, "num_workers=0"),
        ({"timeout_s": 0.0}, "timeout_s=0"),
        ({"episode_timeout_s": -1}, "episode_timeout_s=-1"),
        ({"memory_limit_mib": -1}, "memory_limit_mib=-1"),
        *(
            ({"endpoint_interface": wrong}, "must be the name of a network")
            for wrong in ("", "0.0.0.0", "::", "10.0.0.0/8")
        ),
        ({"max_turns": 0}, "max_turns=0"),
        ({"call_form": "xml"}, "call_form"),
    ],
)
def test_wrong_values_are_one_line(wrong, said):
    with pytest.raises(ConfigError, match=said):
        EnvironmentConfig(**wrong)


@pytest.mark.parametrize(("given", "in_run"), [(None, 900.0), (0, 0), (60.0, 60.0)])
def test_an_episode_ends_well_before_the_run_would(given, in_run):
    """What an evaluation has is its own, which nothing stops."""
    config = EnvironmentConfig(episode_timeout_s=given)
    assert config.within(1800.0).episode_timeout_s == in_run
    assert config.episode_timeout_s == given


def test_a_conversation_has_a_chat_template():
    """Verbatim text would be rendered all the same."""
    run, name = tiny_cpu.tool_gtpo(), EnvironmentConfig(name="mine:Calculator")
    verbatim = replace(run.data, verbatim_text=True)
    said = "verbatim_text=True with environment.name='.*': the turns of a conversation are written by the model's"
    with pytest.raises(ConfigError, match=rf"^data\.{said}"):
        replace(run, data=verbatim).check_new()  # a recorded one can be read
    replace(run, data=verbatim, environment=EnvironmentConfig()).check_new()
    with pytest.raises(ConfigError, match=f"^{said}"):
        EvaluateConfig(benchmarks=("aime24",), verbatim_text=True, environment=name)
    assert EvaluateConfig(benchmarks=("aime24",), verbatim_text=True).verbatim_text


def test_only_an_environment_rewards_turns():
    config = replace(tiny_cpu.tool_gtpo(), algorithm=GTPOConfig(turn_reward_coef=0.5))
    with pytest.raises(ConfigError, match=r"algorithm.turn_reward_coef=0.5 without environment.name: only an env"):
        replace(config, environment=EnvironmentConfig())
    with pytest.raises(ConfigError, match="turn_reward_coef=1e-12: must be 0, or between"):
        GTPOConfig(turn_reward_coef=1e-12)
