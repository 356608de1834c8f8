"""GTPO and GRPO-S on Megatron-core: an RL training recipe. Importing this package imports nothing else."""

__version__ = "0.1.0"
