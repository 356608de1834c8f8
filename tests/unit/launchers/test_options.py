"""What no cluster could do is refused with the option's name."""

import pytest

from gtpo_megatron.errors import ConfigError
from tests.unit.launchers.jobs import tiny_options


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--account", " "], "--account is missing"),
        (["--partition", ""], "--partition is missing"),
        (["--nodes", "0"], "--nodes 0: must be 1 or more"),
        (["--gpus-per-node", "-1"], "--gpus-per-node -1"),
        (["--ray-port", "70000"], "--ray-port 70000: must be a port"),
        (["--chain", "0"], "--chain 0"),
        (["--stop-before-s", "0"], "--stop-before-s 0"),
        (["--sbatch", "qos"], "must be written name=value"),
        (["--env", "NAME"], "must be written NAME=VALUE"),
        (["--env", "MY-NAME=1"], "must be written NAME=VALUE"),
        (["--env", "HF_TOKEN=abc"], "looks like a secret.*export it"),
        (["--env", "WANDB_API_KEY=abc"], "looks like a secret"),
        (["--container-mount", "/a:/b"], "needs --container"),
        (["--container", "x", "--container-mount", "/a"], "must be SOURCE:TARGET"),
    ],
)
def test_each_mistake_is_named(overrides, message):
    with pytest.raises(ConfigError, match=message):
        tiny_options(*overrides).check()


def test_good_options_pass():
    tiny_options("--sbatch", "qos=high", "comment=a=b", "--env", "NCCL_DEBUG=INFO", "X=").check()
