"""Checks and fingerprints the model folder of an evaluation."""

import hashlib
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.fields import Fields
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.untrusted.text import find_text, printable
from gtpo_megatron.weights.megatron.checkpoint_files import converted_weights, is_checkpoint

CONVERT = "gtpo-megatron convert megatron-to-hf"
WEIGHT_ENDINGS = (".safetensors", ".bin")
PIECE_BYTES = 16 << 10
TENSOR_PIECES, FILE_PIECES = 4, 1024
"""Pieces that a fingerprint reads of a tensor, and of a file whose tensors' places are not known."""
MAX_HEADER_BYTES = 100 << 20
"""Of safetensors itself."""
FINGERPRINT_FORM = "tensors:"
"""What fingerprints begin with, but for those of earlier versions, which knew the ends of weights files only."""


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


def model_fingerprint(folder: Path) -> str:
    """A digest of the configuration, the tokenizer and the weights, behind the name of its form.

    Of the weights it reads names and shapes of all tensors, tensors of up to 64 KiB whole, and of larger ones 64 KiB at
    four places: 50 MB of a dense model of 32 billion parameters (771 tensors), 2.3 GB of one with 36,000 tensors of
    experts, where whole files would take minutes. Training moves values all over a tensor; models that differ in a few
    values of a large one may have the same fingerprint. Files that are not safetensors are sampled at 1,024 places,
    wherever their tensors are.

    Raises:
        ConfigError: a weights file is cut short or has no valid header.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in (".json", ".jinja", ".model", ".txt")):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    for path in weight_paths(folder):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb", buffering=0) as file:  # or each piece would be read with its neighbourhood
            for piece in _pieces_of_tensors(file, path) if path.suffix == ".safetensors" else _pieces_of_file(file):
                digest.update(piece)
    return FINGERPRINT_FORM + digest.hexdigest()


def _pieces_of_tensors(file: FileIO, path: Path) -> Iterator[bytes]:
    """The header of a safetensors file, and samples of its tensors."""
    size, place = os.fstat(file.fileno()).st_size, printable(path)
    start = 8 + int.from_bytes(file.read(8), "little")
    if start > min(size, MAX_HEADER_BYTES):
        raise ConfigError(
            f"{place}: is no safetensors file, or cut short: its header would end at byte {start} of {size}"
        )
    header = file.read(start - 8)
    yield header
    tensors = Fields(parse_json(header, f"{place}: its header", error=ConfigError), place, ConfigError)
    spans = [
        tensors.fields(name).get("data_offsets", tuple[int, int]) for name in tensors.raw if name != "__metadata__"
    ]
    for first, end in sorted(spans):
        if not 0 <= first <= end <= size - start:
            raise ConfigError(
                f"{place}: is cut short or damaged: has a tensor at {first} to {end} of {size - start} bytes"
            )
        yield from _sampled(file, start + first, end - first, num_pieces=TENSOR_PIECES)


def _pieces_of_file(file: FileIO) -> Iterator[bytes]:
    return _sampled(file, 0, os.fstat(file.fileno()).st_size, num_pieces=FILE_PIECES)


def _sampled(file: FileIO, start: int, length: int, *, num_pieces: int) -> Iterator[bytes]:
    """Evenly spaced pieces of a part of a file, of which the first and the last are its ends; all of a short one."""
    if length <= num_pieces * PIECE_BYTES:
        file.seek(start)
        yield file.read(length)
        return
    for number in range(num_pieces):
        file.seek(start + (length - PIECE_BYTES) * number // (num_pieces - 1))
        yield file.read(PIECE_BYTES)
