"""Who of a run's processes died first, and what is swept after it."""
