"""How buckets of weights travel from trainer ranks to sampler workers."""
