"""Environment variables that a process needs before it imports vLLM."""

from gtpo_megatron.config.rollout import RolloutConfig

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in this process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CONFIGURE_LOGGING": "0",  # its loggers are like those of any library: log.txt has what they warn of
    "HF_HUB_OFFLINE": "1",  # models are local folders
    "TOKENIZERS_PARALLELISM": "false",
}

CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # compilation of the first batch takes 4 to 14 s
    # threads that wait by spinning keep those that they wait for from the core: beside two busy processes, 64 responses
    # took 25 s in place of 2.5; alone it costs a seventh
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""Additional variables without CUDA, also for Megatron's processes."""


def engine_environment(config: RolloutConfig, *, has_gpus: bool) -> dict[str, str]:
    """All variables for an engine of this configuration."""
    variables = dict(ENVIRONMENT)
    if config.entropy_source == "rollout":
        # our logits processor must fit the model runner: the second one on a GPU, the first one on a CPU
        variables["VLLM_USE_V2_MODEL_RUNNER"] = "1" if has_gpus else "0"
    if not has_gpus:
        variables |= CPU_ENVIRONMENT
        if config.tensor_parallel_size > 1:
            # one core per worker; unbound, they would share the first ones
            variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(core) for core in range(config.tensor_parallel_size))
    return variables
