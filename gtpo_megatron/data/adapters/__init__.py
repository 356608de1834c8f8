"""Data sets that are known by name: one adapter each."""
