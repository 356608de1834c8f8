"""The training loop, and the processes of its stages: one process, or Ray actors."""
