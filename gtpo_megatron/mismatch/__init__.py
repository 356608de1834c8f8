"""How far the sampler's log-probs are from the trainer's: figures, limits, the tokens to look at."""
