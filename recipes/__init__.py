"""Recipes: functions that return a RunConfig. No I/O, no downloads."""
