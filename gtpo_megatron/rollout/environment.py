"""What the process that hosts a VllmEngine must have in its environment before vLLM is imported."""

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
