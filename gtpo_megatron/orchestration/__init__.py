"""The loop, and who runs what: in one process, or over Ray."""
