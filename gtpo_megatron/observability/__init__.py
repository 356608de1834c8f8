"""What a person sees of a run: metrics, logs, the live display and the report."""
