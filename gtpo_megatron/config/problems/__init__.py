"""Which problems a run has: files and names of data sets, prompts, held-out sets."""
