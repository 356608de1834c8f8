"""A configuration from text, through a file."""

import tempfile
from pathlib import Path

from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.config.serialize import load_config


def from_yaml(text: str) -> RunConfig:
    """Reads the text as a run folder's ``config.yaml``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return load_config(path)
