"""What vLLM is started with, by configuration and device."""

from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest

from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.config.rollout import RolloutConfig
from gtpo_megatron.rollout.cache_size import BLOCK_TOKENS
from gtpo_megatron.rollout.engine_arguments import (
    ENTROPY_PROCESSOR,
    GPU_ENTROPY_PROCESSOR,
    LEAST_FREE_SHARE,
    MIN_BATCHED_TOKENS,
    captures_routing,
    llm_arguments,
)
from gtpo_megatron.weights.config_json import read_architecture
from recipes import tiny_cpu

NO_ADAPTER = AdapterConfig()


@pytest.fixture(scope="module")
def architecture():
    return read_architecture(Path(tiny_cpu.gtpo().model.path))


@pytest.fixture
def arguments(architecture):
    def of(*, on_gpu=False, max_sequence_tokens=128, reads_weights=True, adapter=NO_ADAPTER, **config):
        return llm_arguments(
            RolloutConfig(**config),
            architecture,
            on_gpu=on_gpu,
            cache_mib=64,
            max_sequence_tokens=max_sequence_tokens,
            seed=3,
            reads_weights=reads_weights,
            adapter=adapter,
        )

    return of


def test_the_device_decides_what_its_kernels_can_do(arguments):
    cpu, gpu = arguments(), arguments(on_gpu=True)
    differing = {name for name in cpu if cpu[name] != gpu[name]}
    assert differing == {"enable_chunked_prefill", "enforce_eager", "block_size"}
    assert gpu["enable_chunked_prefill"]
    assert not gpu["enforce_eager"]
    assert cpu["kv_cache_memory_bytes"] == 64 << 20


@pytest.mark.parametrize(("on_gpu", "name"), [(False, ENTROPY_PROCESSOR), (True, GPU_ENTROPY_PROCESSOR)])
def test_entropies_need_the_processor_of_the_devices_model_runner(arguments, on_gpu, name):
    assert arguments(on_gpu=on_gpu, entropy_source="rollout")["logits_processors"] == [name]
    assert arguments(on_gpu=on_gpu)["logits_processors"] is None


@pytest.mark.parametrize("on_gpu", [False, True])
def test_routing_is_captured_on_a_cpu_without_the_prefix_cache_and_returned_by_vllm_on_a_gpu(arguments, on_gpu):
    found = arguments(on_gpu=on_gpu, returns_routing=True)
    assert captures_routing(RolloutConfig(returns_routing=True), on_gpu=on_gpu) is not on_gpu
    assert found["enable_prefix_caching"] is on_gpu
    assert found["enable_return_routed_experts"] is on_gpu


def test_blocks_of_a_cpu_are_small_enough_for_a_prompt(architecture, arguments):
    assert (arguments()["block_size"], arguments(on_gpu=True)["block_size"]) == (BLOCK_TOKENS, None)
    latents = replace(architecture, latents=object())
    options = {"cache_mib": 64, "max_sequence_tokens": 128, "seed": 0, "reads_weights": True, "adapter": NO_ADAPTER}
    assert llm_arguments(RolloutConfig(), latents, on_gpu=False, **options)["block_size"] is None


def test_a_delta_nets_state_is_not_cached_by_prefix(architecture):
    delta = replace(architecture, delta=object())
    found = llm_arguments(
        RolloutConfig(),
        delta,
        on_gpu=True,
        cache_mib=64,
        max_sequence_tokens=128,
        seed=0,
        reads_weights=True,
        adapter=AdapterConfig(),
    )
    assert not found["enable_prefix_caching"]


def test_an_engine_that_shares_a_gpu_can_sleep_and_starts_beside_a_trainer(arguments):
    shared = arguments(on_gpu=True, placement="colocated")
    assert shared["enable_sleep_mode"]
    assert shared["gpu_memory_utilization"] == LEAST_FREE_SHARE
    for alone in (arguments(on_gpu=True), arguments(placement="colocated")):
        assert not alone["enable_sleep_mode"]
        assert "gpu_memory_utilization" not in alone


def test_weights_that_nobody_samples_from_are_not_read(arguments):
    assert arguments()["load_format"] == "hf"
    assert arguments(reads_weights=False)["load_format"] == "dummy"


def test_long_sequences_widen_a_pass(arguments):
    assert arguments()["max_num_batched_tokens"] == MIN_BATCHED_TOKENS
    longest = 2 * MIN_BATCHED_TOKENS
    found = arguments(max_sequence_tokens=longest)
    assert found["max_num_batched_tokens"] == found["max_model_len"] == found["hf_overrides"]["model_max_length"]


def test_groups_of_a_continuous_run_have_priorities(arguments):
    assert arguments()["scheduling_policy"] == "fcfs"
    assert arguments(max_staleness=2)["scheduling_policy"] == "priority"


def test_adapters_that_travel_alone_are_vllms_own(arguments):
    adapter = AdapterConfig(rank=4, push="adapters", targets=("q_proj", "v_proj"))
    found = arguments(adapter=adapter)
    assert found["enable_lora"]
    assert found["lora_target_modules"] == list(adapter.targets)
    assert found["max_lora_rank"] == adapter.sampler_rank
    assert "enable_lora" not in arguments()


def test_fp8_is_vllms_rounding_by_rows_of_bfloat16_layers_but_routers(arguments):
    found = arguments(dtype="fp8")
    assert found["dtype"] == "bfloat16"
    assert found["quantization"] == "fp8_per_channel"
    layers = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj", "mlp.experts", "mlp.gate")
    whole = found["quantization_config"]["ignore"]
    kept = [name for name in layers if any(fnmatch(f"model.layers.3.{name}", pattern) for pattern in whole)]
    assert kept == ["mlp.gate"]
    assert "quantization" not in arguments(dtype="bfloat16")
