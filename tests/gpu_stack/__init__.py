"""What a CPU can show of the code that runs on GPUs, with the versions of the `gpu` extra; ``make test-gpu-stack``."""
