"""A cache on a CPU is as large as requests can fill it, and leaves memory to others."""

import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest

from gtpo_megatron.companions.planner.engine import engine_memory
from gtpo_megatron.companions.planner.known_models import KNOWN_MODELS
from gtpo_megatron.config.evaluate import EvaluateConfig
from gtpo_megatron.config.rollout import GPU_CACHE_MIB, RolloutConfig
from gtpo_megatron.rollout import cache_size
from gtpo_megatron.rollout.cache_size import cache_bytes_per_token, cpu_cache_mib, log_cpu_cache
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.model_shape import DeltaNet
from recipes.tiny_cpu import ASSETS

TINY = read_architecture(ASSETS / "tiny_qwen2")
LARGE = replace(TINY, num_layers=28, num_heads=28, num_query_groups=4, head_size=128, hidden_size=3584)
"""Of a 7B: 56 KiB a token in bfloat16."""
GIB = 1 << 30


def size(architecture=TINY, *, free=20 * GIB, max_tokens=512, **rollout):
    return cpu_cache_mib(RolloutConfig(**rollout), architecture, max_tokens=max_tokens, free_bytes=free)


@pytest.mark.parametrize("architecture", [TINY, LARGE])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_token_takes_what_the_planner_says(architecture, dtype, workers):
    planned = engine_memory(
        architecture,
        tensor=workers,
        weight_bytes={"float32": 4, "bfloat16": 2}[dtype],
        max_sequences=1,
        sequence_tokens=1,
    )
    assert cache_bytes_per_token(architecture, workers=workers, dtype=dtype) == planned.cache_per_token


def test_it_is_what_all_sequences_fill():
    per_token = cache_bytes_per_token(TINY, workers=1, dtype="bfloat16")
    assert size() == 256 * 512 * per_token >> 20
    assert size(max_concurrent_sequences=512) == 2 * size()
    assert size(max_tokens=1000) == 2 * size(), "in whole blocks of 32"
    assert size(dtype="float32") == 2 * size()
    assert size(dtype="fp8") == size()


def test_latents_have_the_larger_of_the_blocks_that_vllm_may_choose():
    latent = replace(KNOWN_MODELS["deepseek-ai/DeepSeek-V3"], delta=None)
    assert size(latent, max_tokens=129, max_concurrent_sequences=8) == size(
        latent, max_tokens=256, max_concurrent_sequences=8
    )


def test_it_leaves_most_of_the_free_memory_to_others():
    assert size(LARGE, max_tokens=4096) == 5 * 1024
    assert size(LARGE, max_tokens=4096, num_engines=2, tensor_parallel_size=2) == 5 * 256


def test_one_sequence_fits_in_any_case():
    assert (
        size(LARGE, max_tokens=4096, free=0) == 4096 * cache_bytes_per_token(LARGE, workers=1, dtype="bfloat16") >> 20
    )
    assert size(free=0) == cache_size.LEAST_MIB


@pytest.mark.parametrize("free", [0, 20 * GIB, 2000 * GIB])
def test_what_was_asked_for_is_respected(free):
    assert size(LARGE, kv_cache_mib=1, free=free) == 1
    assert size(kv_cache_mib=16384, free=free) == 16384


def test_what_was_chosen_is_one_line(caplog, monkeypatch):
    monkeypatch.setattr(cache_size, "memory", lambda: (24 * GIB, 8 * GIB))
    with caplog.at_level(logging.INFO):
        chosen = log_cpu_cache(RolloutConfig(), LARGE, max_tokens=4096)
        log_cpu_cache(RolloutConfig(kv_cache_mib=7), LARGE, max_tokens=4096)
    assert chosen == 2048
    assert [record.getMessage() for record in caplog.records] == [
        "key-value cache: 2048 MiB, of the 57344 MiB that 256 sequences of 4096 tokens can fill; 8.0 GiB of memory are "
        "free; kv_cache_mib gives another size"
    ]


def test_on_a_gpu_nothing_has_changed():
    assert GPU_CACHE_MIB == 16384
    assert RolloutConfig().gpu_cache_mib == 16384
    assert RolloutConfig(kv_cache_mib=5).gpu_cache_mib == 5
    config = EvaluateConfig(benchmarks=("aime24",))
    assert config.engine.rollout(config.sampling).gpu_cache_mib == 16384


def test_states_of_delta_nets_have_room():
    """In blocks that hold a float32 state: one a sequence and delta net, beside those of the layer with attention."""
    delta = DeltaNet(
        num_key_heads=2, num_value_heads=4, key_size=128, value_size=128, conv_size=4, layers=(True,) * 3 + (False,)
    )
    mixed = replace(TINY, num_layers=4, num_heads=4, num_query_groups=2, head_size=64, delta=delta)
    per_token = cache_bytes_per_token(mixed, workers=1, dtype="bfloat16")
    assert per_token == 2 * 2 * 64 * 2
    state_bytes = 4 * 4 * 128 * 128 + 2 * 3 * (2 * 2 * 128 + 4 * 128)
    block = 32 * -(-state_bytes // (32 * per_token))
    assert size(mixed, max_tokens=block + 1) == -(-256 * (2 + 3) * block * per_token // (1 << 20))


@pytest.mark.vllm
def test_a_block_holds_a_state_of_vllm_s_shape():
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

    shape = KNOWN_MODELS["Qwen/Qwen3-Next-80B-A3B"]
    for workers in (1, 2, 8):
        shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(workers, 16, 32, 128, 128, 4)
        state, of_token = sum(map(math.prod, shapes)), shape.cached_elements(workers) // 12
        block = shape.cache_block(workers, 16)
        assert (block - 16) * of_token < state <= block * of_token


@pytest.mark.vllm
def test_a_block_is_what_kernels_of_the_vllm_that_is_installed_want():
    import vllm.platforms.cpu

    source = Path(vllm.platforms.cpu.__file__).read_text(encoding="utf-8")
    assert f"cache_config.block_size % {cache_size.BLOCK_TOKENS} != 0" in source
