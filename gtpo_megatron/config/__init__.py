"""Typed, frozen, validated configuration. It needs no torch, so that a laptop can import it."""
