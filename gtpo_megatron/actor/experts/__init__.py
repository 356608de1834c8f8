"""Adds to Megatron's mixture of experts: balance and replayed routing."""
