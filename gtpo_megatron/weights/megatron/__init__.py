"""Folders of Megatron distributed checkpoints, without Megatron."""
