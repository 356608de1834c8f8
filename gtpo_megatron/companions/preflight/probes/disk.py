"""Speed of the disk under the run folder, written and read back by every node at once."""

import os
import time
from pathlib import Path
from typing import Any

import xxhash

CHUNK = 4 << 20


def file_of(folder: Path, name: str) -> Path:
    """The file that a process writes."""
    return folder / f"disk-{name.replace(' ', '-')}.bin"


def write_and_read(_held: object, folder: str, name: str, num_bytes: int) -> dict[str, Any]:
    """Writes a file through to the disk and reads it again.

    Reading comes from the machine's cache where there is room for it, so its rate is an upper bound.

    Returns:
        ``write_s``, ``read_s``, ``wrote`` and ``read``: checksums of what was written and of what came back.
    """
    path = file_of(Path(folder), name)
    pattern = os.urandom(CHUNK)
    wrote, read = xxhash.xxh3_64(), xxhash.xxh3_64()
    began = time.perf_counter()
    with path.open("wb") as file:
        for number in range(num_bytes // CHUNK):
            piece = number.to_bytes(8, "big") + pattern[8:]
            wrote.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    write_s = time.perf_counter() - began
    began = time.perf_counter()
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            read.update(piece)
    return {
        "write_s": write_s,
        "read_s": time.perf_counter() - began,
        "wrote": wrote.hexdigest(),
        "read": read.hexdigest(),
    }
