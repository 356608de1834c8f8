"""The files of a run folder: one module per kind of file."""
