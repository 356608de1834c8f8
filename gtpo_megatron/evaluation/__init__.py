"""Held-out accuracy: pure metrics, benchmarks, and the evaluator that fills them."""
