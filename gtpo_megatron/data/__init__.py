"""Prompts: the rows of a dataset, rendered, tokenised and dealt out in a resumable order."""
