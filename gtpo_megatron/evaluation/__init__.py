"""Held-out accuracy: metrics, benchmarks, and the evaluator during training."""
