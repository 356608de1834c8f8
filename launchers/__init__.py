"""Launchers: the only importers of nemo_run, and the only readers of the environment."""
