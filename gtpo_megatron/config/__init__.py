"""Typed, frozen, validated configuration. Standard library only, so that a laptop can import it."""
