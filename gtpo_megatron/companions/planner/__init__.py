"""The memory planner: bytes of every part on every rank, for every layout, from numbers alone. No GPU, no weights."""
