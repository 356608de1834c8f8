"""Launchers: the only modules that import nemo_run or read the environment."""
