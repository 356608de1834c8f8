import pytest

from gtpo_megatron.config.output import LoggingConfig
from gtpo_megatron.errors import ConfigError


def test_defaults_are_valid_and_choose_no_logger():
    config = LoggingConfig()
    assert not config.tensorboard
    assert config.wandb_project is None
    assert config.rollout_groups_per_step == 2


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"log_level": "LOUD"}, "log_level='LOUD': must be one of 'DEBUG'"),
        ({"wandb_mode": "maybe"}, "wandb_mode='maybe'"),
        ({"wandb_project": " "}, "wandb_project is empty"),
        ({"wandb_entity": "lab"}, "wandb_entity='lab' without wandb_project"),
        ({"rollout_groups_per_step": -1}, "rollout_groups_per_step=-1"),
        ({"rollout_every_steps": 0}, "rollout_every_steps=0"),
    ],
)
def test_bad_values_name_field_value_and_what_is_allowed(changes, match):
    with pytest.raises(ConfigError, match=match):
        LoggingConfig(**changes)


def test_a_wandb_project_with_its_entity_is_fine():
    assert LoggingConfig(wandb_project="gtpo", wandb_entity="lab").wandb_entity == "lab"
