"""Prompts: reading, rendering and tokenising data sets, sampling in a resumable order, packing."""
