"""Whether a run is healthy: one verdict a sign, with its rule, from the metrics alone."""
