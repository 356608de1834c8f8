"""Every kind of file of a run folder: who writes it, how it is read."""
