"""What the process that hosts a VllmEngine must have in its environment before vLLM is imported."""

from gtpo_megatron.config.rollout import RolloutConfig

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in this process: one process fewer to watch
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",  # models are folders; nothing is fetched while a run is up
    "TOKENIZERS_PARALLELISM": "false",
}

CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # the first batch would compile for 4 to 14 s
}
"""In addition, where there is no CUDA; good for Megatron's processes too."""


def engine_environment(config: RolloutConfig, *, has_gpus: bool) -> dict[str, str]:
    """Everything that an engine of this configuration needs."""
    variables = dict(ENVIRONMENT)
    if config.entropy_source == "rollout":
        # our logits processor is written for the first model runner; the second has another interface
        variables["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if not has_gpus:
        variables |= CPU_ENVIRONMENT
        if config.tensor_parallel_size > 1:
            # a core for every worker; unbound, they would share the first ones
            variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(core) for core in range(config.tensor_parallel_size))
    return variables
