"""Standalone maintenance scripts, and the arithmetic task that they generate."""
