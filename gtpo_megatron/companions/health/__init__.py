"""Whether a run is healthy: one finding a sign, with its rule, from the metrics alone."""
