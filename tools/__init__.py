"""Maintenance scripts; each runs by itself."""
