"""Checks and fingerprints the model folder of an evaluation."""

import hashlib
from pathlib import Path
from typing import Any

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.untrusted.text import find_text, printable
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.conversion import converted_weights
from gtpo_megatron.weights.megatron.reader import is_checkpoint

CONVERT = "gtpo-megatron convert megatron-to-hf"
WEIGHT_ENDINGS = (".safetensors", ".bin")
SAMPLE_BYTES = 1 << 20
"""Bytes read at each end of a weights file; whole files would take minutes."""


def check_model_folder(folder: Path) -> dict[str, Any]:
    """The ``config.json`` of a Hugging Face model folder.

    Raises:
        ConfigError: it is not a model folder, or has no weights.
    """
    if is_checkpoint(folder):
        raise ConfigError(
            f"model {folder} is a Megatron checkpoint outside a run: its configuration and tokenizer are elsewhere; "
            f"make a model folder of it: {CONVERT} {folder} DST --model FOLDER"
        )
    if not folder.is_dir():
        raise ConfigError(f"model {folder}: no such folder; expected a Hugging Face model folder or a run folder")
    text = find_text(folder / "config.json", error=ConfigError)
    if text is None:
        raise ConfigError(
            f"model {folder}: neither a Hugging Face model folder (it has no config.json) nor a run folder "
            "(it has no config.yaml)"
        )
    place = printable(folder / "config.json")
    config = Fields(parse_json(text, place, error=ConfigError), place, ConfigError).raw
    if not weight_paths(folder) and converted_weights(folder) is not None:
        raise ConfigError(
            f"model {folder} has its weights in Megatron's format; make a model folder of it: {CONVERT} {folder} DST"
        )
    if not weight_paths(folder):
        raise ConfigError(f"model {folder}: has no weights; expected *.safetensors")
    return config


def weight_paths(folder: Path) -> list[Path]:
    """Its weights files; safetensors if there are any."""
    for ending in WEIGHT_ENDINGS:
        found = sorted(path for path in folder.iterdir() if path.suffix == ending and path.is_file())
        if found:
            return found
    return []


def check_can_sample(architecture: Architecture, needed: int) -> None:
    """Raises ConfigError if vLLM has no class for the model, or it has fewer positions than ``needed`` tokens."""
    architecture.check_engine()
    if needed > architecture.max_positions:
        raise ConfigError(
            f"max_prompt_tokens + sampling.max_response_tokens = {needed} exceeds the model's "
            f"{architecture.positions_said}; "
            f"shorten one of them"
        )


def model_fingerprint(folder: Path) -> str:
    """A digest of the configuration, the tokenizer and the weights.

    Of each weights file it reads the name, the size and one mebibyte at each end.
    """
    digest = hashlib.sha256()
    weights = weight_paths(folder)
    for path in sorted(path for path in folder.iterdir() if path.suffix in (".json", ".jinja", ".model", ".txt")):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    for path in weights:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(SAMPLE_BYTES))
            if size > SAMPLE_BYTES:
                file.seek(max(SAMPLE_BYTES, size - SAMPLE_BYTES))
                digest.update(file.read())
    return digest.hexdigest()
