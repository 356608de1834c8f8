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
        (["--mem", "lots"], "--mem 'lots': must be a whole number and K, M, G or T"),
        (["--host-memory-gib", "-1"], "--host-memory-gib -1.0: must be 0 or more"),
        (["--sbatch", "qos"], "must be written name=value"),
        (["--env", "NAME"], "must be written NAME=VALUE"),
        (["--env", "MY-NAME=1"], "must be written NAME=VALUE"),
        (["--env", "HF_TOKEN=abc"], "looks like a secret.*export it"),
        (["--env", "WANDB_API_KEY=abc"], "looks like a secret"),
        (["--container-mount", "/a:/b"], "needs --container"),
        (["--container", "x", "--container-mount", "/a"], "must be SOURCE:TARGET"),
        (["--container", "x", "--container-mount", "/my dir:/a"], "takes no blanks, commas or quotes"),
        (["--container", "my image.sqsh"], "takes no blanks, commas or quotes"),
    ],
)
def test_each_mistake_is_named(overrides, message):
    with pytest.raises(ConfigError, match=message):
        tiny_options(*overrides).check()


def test_good_options_pass():
    tiny_options("--sbatch", "qos=high", "comment=a=b", "--env", "NCCL_DEBUG=INFO", "X=").check()


@pytest.mark.parametrize(
    ("overrides", "mebibytes"),
    [
        ([], 0),
        (["--mem", "0"], 0),
        (["--mem", "2048"], 2048),
        (["--mem", "3g"], 3072),
        (["--mem", "1T"], 1 << 20),
        (["--host-memory-gib", "1.5"], 1536),
        (["--mem", "0", "--host-memory-gib", "2"], 2048),
    ],
)
def test_memory_of_a_node_as_slurm_writes_it(overrides, mebibytes):
    assert tiny_options(*overrides).host_memory_bytes == mebibytes << 20
