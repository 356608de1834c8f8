"""What an engine is started with: vLLM's arguments, and the environment variables that must be set before its import.

Pure functions of the configuration, the model and the device; nothing here imports vLLM.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.config.rollout import RolloutConfig
from gtpo_megatron.rollout.cache_size import BLOCK_TOKENS, STATE_DTYPE
from gtpo_megatron.weights.adapter_shapes import targets_of
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.config_json import CHUNKS
from gtpo_megatron.weights.fp8_layers import WHOLE_LAYERS
from gtpo_megatron.weights.quantization import KEY as QUANTIZATION
from gtpo_megatron.weights.text_part import has_other_parts, text_config

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in this process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CONFIGURE_LOGGING": "0",  # its loggers are like those of any library: log.txt has what they warn of
    "HF_HUB_OFFLINE": "1",  # models are local folders
    "TOKENIZERS_PARALLELISM": "false",
}

CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # compilation of the first batch takes 4 to 14 s
    # turns that a thread waits by spinning before it sleeps: libgomp's 300,000 keep those that it waits for from the
    # core (beside two busy processes 64 responses took 25 s in place of 2.5); so few cost a tenth there, and none cost
    # 5% on a quiet machine
    "GOMP_SPINCOUNT": "1000",
}
"""Additional variables without CUDA, also for Megatron's processes."""

ENTROPY_PROCESSOR = "gtpo_megatron.rollout.sampled_entropy:SampledEntropy"
"""Name of the logits processor for vLLM's first model runner, the only one on a CPU."""

GPU_ENTROPY_PROCESSOR = f"{ENTROPY_PROCESSOR}OfSlots"
"""Name of the one for its second model runner; ``engine_environment`` asks for that on a GPU."""

TEXT_PART_FORMAT = "gtpo_text_part"
"""vLLM's name of our loader for folders with other parts than text."""

MIN_BATCHED_TOKENS = 8192
"""Least number of tokens per pass of vLLM: small passes waste time."""

LEAST_FREE_SHARE = 0.05
"""Fraction of a shared GPU's memory that must be free for vLLM to start (``gpu_memory_utilization``); small, because
the trainer may use the rest when an engine is replaced. The cache's size is set separately."""


def engine_environment(config: RolloutConfig, *, has_gpus: bool) -> dict[str, str]:
    """All variables for an engine of this configuration."""
    variables = dict(ENVIRONMENT)
    if config.entropy_source == "rollout":
        # our logits processor must fit the model runner: the second one on a GPU, the first one on a CPU
        variables["VLLM_USE_V2_MODEL_RUNNER"] = "1" if has_gpus else "0"
    if not has_gpus:
        variables |= CPU_ENVIRONMENT
        if config.ranks_per_engine > 1:
            # one core per worker; unbound, they would share the first ones
            variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(core) for core in range(config.ranks_per_node))
    return variables


def captures_routing(config: RolloutConfig, *, on_gpu: bool) -> bool:
    """Whether our worker notes the experts of every token, because vLLM returns them on GPUs only."""
    return config.returns_routing and not on_gpu


def llm_arguments(
    config: RolloutConfig,
    architecture: Architecture,
    *,
    on_gpu: bool,
    cache_mib: int,
    max_sequence_tokens: int,
    seed: int,
    reads_weights: bool,
    adapter: AdapterConfig,
) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``, beside the model's folder and our code in its workers.

    Args:
        config: settings of the engine.
        architecture: architecture of the model.
        on_gpu: vLLM runs on a GPU, else on a CPU.
        cache_mib: size of the key-value cache in each worker.
        max_sequence_tokens: maximum length of prompt plus response.
        seed: vLLM's own seed.
        reads_weights: the folder's weights are loaded, else they are of no meaning until the first push.
        adapter: adapters of the run.
    """
    folder_format = TEXT_PART_FORMAT if architecture.also_sees else "hf"
    routing_is_captured = captures_routing(config, on_gpu=on_gpu)
    arguments: dict[str, Any] = {
        # the hub's folders of Mistral have files in its own format besides, which vLLM would prefer
        "load_format": folder_format if reads_weights else "dummy",
        "config_format": "hf",
        "tokenizer_mode": "hf",
        "use_tqdm_on_load": False,
        "dtype": config.activation_dtype,
        # vLLM allows no more than max_position_embeddings, which files with YaRN may leave as it was, unless this
        # field does; what the model can do is checked before any process starts
        "hf_overrides": {"head_dtype": config.head_dtype, "model_max_length": max_sequence_tokens},
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "enable_expert_parallel": config.expert_parallel,
        "max_model_len": max_sequence_tokens,
        "max_num_seqs": config.max_concurrent_sequences,
        "kv_cache_memory_bytes": cache_mib << 20,
        # latents: of two kernels on a CPU one knows its own size only
        "block_size": None if on_gpu or architecture.latents is not None else BLOCK_TOKENS,
        "max_num_batched_tokens": max(MIN_BATCHED_TOKENS, max_sequence_tokens),
        # with chunked prefill vLLM rewinds a request's generator, which CPU generators do not support
        "enable_chunked_prefill": on_gpu,
        "enforce_eager": not on_gpu,
        # a delta net's state stands for all tokens before: vLLM could keep some, at ends of large blocks, and on a
        # CPU, without chunked prefill, none
        "enable_prefix_caching": not routing_is_captured and architecture.delta is None,
        "mamba_ssm_cache_dtype": STATE_DTYPE,
        # groups are begun one by one: those that were drawn earlier are served first
        "scheduling_policy": "priority" if config.is_continuous else "fcfs",
        "generation_config": "vllm",  # the folder's generation_config must not change the sampling distribution
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "enable_sleep_mode": False,
        "enable_return_routed_experts": config.returns_routing and not routing_is_captured,
        "seed": seed,
        "logits_processors": None,
    }
    if config.dtype == "fp8":
        arguments |= {"quantization": "fp8_per_channel", "quantization_config": {"ignore": list(WHOLE_LAYERS)}}
    if architecture.also_sees:  # of which a whole configuration has its class's default in the place of ours
        arguments["hf_overrides"]["tie_word_embeddings"] = architecture.tied_embeddings
    if architecture.is_quantized or architecture.also_sees or architecture.asks_for_chunks:
        arguments["hf_overrides"] = partial(_plain_text, overrides=arguments["hf_overrides"])
    if config.entropy_source == "rollout":
        arguments["logits_processors"] = [GPU_ENTROPY_PROCESSOR if on_gpu else ENTROPY_PROCESSOR]
    if on_gpu and config.placement == "colocated":
        arguments |= {"enable_sleep_mode": True, "gpu_memory_utilization": LEAST_FREE_SHARE}
    if adapter.pushes_alone:
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": adapter.sampler_rank,
            "lora_target_modules": list(targets_of(architecture, adapter)),  # without them vLLM would wrap experts too
        }
    return arguments


def _plain_text(config: Any, *, overrides: Mapping[str, Any]) -> Any:
    """VLLM's configuration of the text part, of 16 bits: what is pushed is not quantized, and fits no layers of fewer.

    Attention is whole, as the trainer's. vLLM asks more than once, and before it reads the folder with a configuration
    of no model.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # vLLM has imported it

    whole = config.to_dict()
    if has_other_parts(whole):
        text = text_config(whole)
        config = CONFIG_MAPPING[text["model_type"]].from_dict(text)
    for name in (QUANTIZATION, CHUNKS):
        if hasattr(config, name):
            delattr(config, name)
    config.update(dict(overrides))
    return config
