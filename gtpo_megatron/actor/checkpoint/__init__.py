"""Saves and restores the state of a rank."""
