"""Finds the first death among a run's processes, and cleans up after the run."""
