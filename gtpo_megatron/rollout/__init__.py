"""Sampling responses with vLLM, on a GPU or on a CPU."""
