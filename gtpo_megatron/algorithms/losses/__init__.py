"""Losses of tokens or responses, and what they need of the whole batch: selections and denominators."""
