"""Adapters in a configuration."""

import math
from dataclasses import replace

import pytest

from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.config.model import BalanceConfig
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


UNUSED = (
    *(("path", "folder"), ("alpha", 64.0), ("targets", ("q_proj",)), ("dtype", "float32"), ("push", "adapters")),
    ("scaling", "sqrt_rank"),
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 4, "targets": ()}, "must be names of projections, each once"),
        ({"rank": 4, "targets": ("q_proj", "q_proj")}, "each once"),
        *(({name: value}, f"adapter.{name}=.* with adapter.rank=0: no adapters are trained") for name, value in UNUSED),
        ({"rank": 513, "push": "adapters"}, "vLLM takes ranks up to 512; use push='merged'"),
    ],
)
def test_what_cannot_be(fields, message):
    with pytest.raises(ConfigError, match=message):
        AdapterConfig(**fields)


def test_routers_are_frozen():
    config = tiny_cpu.moe_gtpo()
    for name in ("aux_loss_coef", "bias_update_rate"):
        with pytest.raises(ConfigError, match=f"balance.{name}=0.1 with adapter.rank=4: routers are frozen"):
            replace(config, adapter=AdapterConfig(rank=4), balance=BalanceConfig(**{name: 0.1}))


def test_the_sampler_has_no_finer_weights_than_the_trainer():
    """Alone, adapters are multiplied with the weights that vLLM itself has read."""
    run = tiny_cpu.gtpo_lora()
    alone = replace(run.adapter, push="adapters")
    coarse = replace(run.model, dtype="bfloat16")
    with pytest.raises(ConfigError, match="unrounded, the trainer rounds them; use rollout.dtype='bfloat16', or push="):
        replace(run, adapter=alone, model=coarse)
    replace(run, adapter=alone, model=coarse, rollout=replace(run.rollout, dtype="bfloat16"))
    replace(run, model=coarse)


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
