"""The driver's loop: steps, sampling ahead, metrics, checkpoints."""
