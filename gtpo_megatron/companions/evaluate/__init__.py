"""``gtpo-megatron evaluate``: a model on benchmarks, with intervals; it goes on where it was stopped."""
