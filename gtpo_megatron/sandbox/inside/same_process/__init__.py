"""A program in the process of its tests, and what is checked when it runs."""
