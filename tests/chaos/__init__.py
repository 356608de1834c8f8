"""Kills and stops every kind of process of real runs, in every stage; ``python -m tests.chaos --help``."""
