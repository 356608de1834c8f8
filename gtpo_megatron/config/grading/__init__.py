"""How responses are graded: reward functions, their processes, the judge."""
