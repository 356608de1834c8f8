"""Verifies that a checkpoint's files are those that were written; every reader uses this module.

``manifest.json`` lists every file of a checkpoint with its size and checksum, and has a checksum of its own text. What
it says of the run besides is read in ``run_folder/manifest.py``.
"""

import json
import logging
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.untrusted.fields import Fields, as_record
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.untrusted.text import bare_name, find_bytes, printable, reason

logger = logging.getLogger(__name__)

Verify = Literal["full", "sizes", "none"]
"""What a reader compares with the manifest: every size and checksum; all but the checksums of shards; nothing."""

MANIFEST_FILE = "manifest.json"
MEGATRON_FOLDER = "megatron"
"""Of a converted model: its checkpoint, which has no manifest."""

FORMAT = 2
ALGORITHM = "xxh3_128"
"""Of all checksums."""

_SEAL = "checksum"
_OPEN_SEAL = "0" * 32
_SEALED = re.compile(r"[0-9a-f]{32}")
_SHARD_ENDING = ".distcp"
_READERS = 8
"""Files that are read at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of a checkpoint.

    Attributes:
        num_bytes: its size.
        checksum: hexadecimal, see ``weights/megatron/checkpoint_files.py``.
    """

    num_bytes: int
    checksum: str


def is_checkpoint(folder: Path) -> bool:
    """Returns whether a folder is in Megatron's format; it may still be damaged."""
    return (folder / "metadata.json").is_file() and (folder / ".metadata").is_file()


def converted_weights(folder: Path) -> Path | None:
    """Path of a converted folder's Megatron checkpoint; None if the folder is not a converted one."""
    found = folder / MEGATRON_FOLDER
    return found if is_checkpoint(found) else None


def sealed(manifest: Mapping[str, Any]) -> str:
    """Returns a manifest as text that contains the checksum of that text."""
    text = json.dumps({_SEAL: _OPEN_SEAL, **manifest}, indent=1)
    return text.replace(_OPEN_SEAL, _digest(text.encode()), 1)


def read_sealed(folder: Path) -> dict[str, Any]:
    """Reads a checkpoint's manifest and verifies its checksum.

    Raises:
        CheckpointError: there is none, it is damaged, or another version wrote it.
    """
    path = folder / MANIFEST_FILE
    content = find_bytes(path, error=CheckpointError)
    if content is None:
        raise CheckpointError(
            f"{printable(folder)} has no {MANIFEST_FILE}: files were lost; to take it without any check, add "
            f"--checkpoint.verify none (train) or --no-verify (other commands)"
        )
    fields = Fields(parse_json(content, printable(path), error=CheckpointError), printable(path), CheckpointError)
    found = fields.raw.get("format")
    if found != FORMAT:
        raise CheckpointError(
            f"{printable(path)}: format {printable(found)}, expected {FORMAT}; use the version that wrote it"
        )
    algorithm = fields.get("checksum_algorithm", str, ALGORITHM)
    if algorithm != ALGORITHM:
        raise CheckpointError(
            f"{printable(path)}: checksum_algorithm {printable(algorithm)}, expected {ALGORITHM}; use the version that "
            f"wrote it"
        )
    seal = fields.get(_SEAL, str)
    if not _SEALED.fullmatch(seal) or _digest(content.replace(seal.encode(), _OPEN_SEAL.encode(), 1)) != seal:
        raise CheckpointError(f"{printable(path)} is damaged: its text has another checksum than it says")
    return fields.raw


def files_of(manifest: Mapping[str, Any], folder: Path) -> dict[str, FileEntry]:
    """Returns the files that a manifest lists, by name.

    Raises:
        CheckpointError: the list is malformed, or a name leads out of the folder.
    """
    where = printable(folder / MANIFEST_FILE)
    listed = Fields(manifest, where, CheckpointError).get("files", dict)
    return {
        bare_name(name, f"{where}: files", CheckpointError): as_record(
            FileEntry, entry, f"{where}: files: {printable(name)}", CheckpointError
        )
        for name, entry in listed.items()
    }


def check_checkpoint(folder: Path, verify: Verify) -> None:
    """Compares a checkpoint with its manifest; logs a warning if ``verify`` is ``none``.

    Args:
        folder: folder of the checkpoint. A converted model has no manifest and passes.
        verify: how much is compared.

    Raises:
        CheckpointError: it has no manifest, or is damaged.
    """
    if verify == "none":
        logger.warning("%s is NOT VERIFIED, as was asked for: damage to its files would not be noticed", folder)
    elif not (_is_converted(folder) and not (folder / MANIFEST_FILE).exists()):
        check_files(folder, files_of(read_sealed(folder), folder), verify)


def check_files(folder: Path, files: Mapping[str, FileEntry], verify: Verify) -> None:
    """Compares the files with their entries; shards are read only if ``verify`` is ``full``.

    Raises:
        CheckpointError: a file is missing, or has another size or content.
    """
    for name, entry in sorted(files.items()):
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"checkpoint {folder} lacks {name}: {reason(error)}") from error
        if found != entry.num_bytes:
            raise CheckpointError(
                f"checkpoint {folder} is damaged: {name} has {found} bytes, expected {entry.num_bytes}"
            )
    read = [name for name in sorted(files) if verify == "full" or not name.endswith(_SHARD_ENDING)]
    trouble = first_trouble(folder, {name: files[name].checksum for name in read})
    if trouble:
        raise CheckpointError(f"checkpoint {folder} is damaged: {trouble}; take another, or copy it again")


def first_trouble(folder: Path, checksums: Mapping[str, str]) -> str:
    """Describes the first file, by name, whose content differs from its checksum; empty if there is none."""
    with ThreadPoolExecutor(max_workers=_READERS) as pool:  # reading and summing up leave the interpreter free
        troubles = pool.map(lambda pair: _trouble(folder, *pair), sorted(checksums.items()))
        return next(filter(None, troubles), "")


def _trouble(folder: Path, name: str, checksum: str) -> str:
    try:
        found = file_checksum(folder / name)
    except OSError as error:
        return f"{name} cannot be read: {reason(error)}"
    if found == checksum:
        return ""
    return f"{name} has checksum {found}, expected {checksum}: its content changed on the disk"


def _is_converted(folder: Path) -> bool:
    return folder.name == MEGATRON_FOLDER and (folder.parent / "config.json").is_file()


def _digest(content: bytes) -> str:
    return xxhash.xxh3_128(content).hexdigest()


_BLOCK_BYTES = 1 << 22


def file_checksum(path: Path) -> str:
    """The checksum in hexadecimal.

    Raises:
        OSError: the file is missing or cannot be read.
    """
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
