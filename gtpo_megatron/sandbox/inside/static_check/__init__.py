"""A check by its text whether a program may share the process of its tests: it knows what is allowed."""
