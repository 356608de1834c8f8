"""Adapters in a configuration."""

import math
from dataclasses import replace

import pytest

from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.errors import ConfigError
from recipes import tiny_cpu


def test_scales():
    assert AdapterConfig(rank=16, alpha=32.0).scale == 2
    assert AdapterConfig(rank=16, alpha=32.0, scaling="sqrt_rank").scale == 8
    assert math.isclose(AdapterConfig(rank=3, alpha=1.0).scale, 1 / 3)
    assert not AdapterConfig().is_on


@pytest.mark.parametrize(("rank", "sampler"), [(1, 1), (2, 8), (16, 16), (17, 32), (300, 320)])
def test_vllm_is_started_with_a_rank_that_it_knows(rank, sampler):
    assert AdapterConfig(rank=rank, push="adapters").sampler_rank == sampler


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"targets": ()}, "must be names of projections, each once"),
        ({"targets": ("q_proj", "q_proj")}, "each once"),
        ({"path": "folder"}, "with adapter.rank=0: no adapters are trained"),
        ({"rank": 513, "push": "adapters"}, "vLLM takes ranks up to 512; use push='merged'"),
    ],
)
def test_what_cannot_be(fields, message):
    with pytest.raises(ConfigError, match=message):
        AdapterConfig(**fields)


def test_an_optimizer_on_the_host_is_for_all_weights():
    config = tiny_cpu.gtpo()
    parallel = replace(config.parallel, distributed_optimizer=True)
    with pytest.raises(ConfigError, match="the optimizer has the adapters only, and stays on the GPU; set it to 0"):
        replace(
            config,
            parallel=parallel,
            adapter=AdapterConfig(rank=4),
            optimizer=replace(config.optimizer, offload_fraction=0.5),
        )
