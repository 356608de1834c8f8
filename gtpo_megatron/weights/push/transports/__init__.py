"""Transports of a push: they move bytes and know no tensor names."""
