"""One two-way name table a model family."""
