"""The stages as Ray actors: where they are placed, how they start, how calls are collected."""
