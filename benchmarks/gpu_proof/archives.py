"""What a bare machine lacks, in archives of a limited size: made here, put together there, in whatever order they come.

Each group of distributions is a stream of its wheels' files, compressed. Streams are cut where an archive is full, and
every archive has the list of all pieces, so that whichever is there says what is not.
"""

import hashlib
import io
import json
import lzma
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from benchmarks.gpu_proof import wheels
from benchmarks.gpu_proof.needs import LEFT_OUT, is_left_out

BUILT = wheels.ROOT / "build" / "gpu_proof"
"""git ignores it; archives unpack into it."""

LIST = BUILT / "pieces.json"
SLACK = 1 << 19
"""Bytes of an archive that headers take, and gzip of what is compressed already."""

READ = 1 << 20
MODE = 0o644


class ArchiveError(Exception):
    """Archives cannot be made, or what has arrived cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a group's stream.

    Attributes:
        group: name of a group of distributions.
        number: from 0.
        archive: name of the archive that has it.
        sha256: digest of its bytes.
    """

    group: str
    number: int
    archive: str
    sha256: str

    @property
    def path(self) -> Path:
        """Where it lies, here and there."""
        return BUILT / "pieces" / f"{self.group}.{self.number}"


# ------------------------------------------------------------------------------------------------------------ made here
def pack(
    target: Path, *, limit: int, groups: Sequence[str], there: Sequence[str] = (), replaced: Sequence[str] = ()
) -> dict[Path, list[str]]:
    """Writes the archives: the committed repository with the first pieces, then the others.

    Args:
        target: ``NAME.tar.gz``; the archives are ``NAME.1.tar.gz`` and so on.
        limit: bytes of an archive.
        groups: groups of distributions.
        there: ``name`` or ``name==version`` of what the machine has, as ``pip list --format=freeze`` prints it.
        replaced: requirements in the place of those of the same names.

    Returns:
        The archives, each with the groups that it has pieces of.

    Raises:
        ArchiveError: the repository alone is larger than the limit.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    stem = target.name.removesuffix(".gz").removesuffix(".tar")
    for old in target.parent.glob(f"{stem}.*.tar.gz"):
        old.unlink()
    repository = subprocess.run(
        ["git", "archive", "--format=tar.gz", "HEAD"], cwd=wheels.ROOT, capture_output=True, check=True
    ).stdout
    room = limit - len(repository) - SLACK
    if room < 0:
        raise ArchiveError(
            f"the repository has {len(repository) / 2**20:.1f} MiB, an archive {limit / 2**20:g} at most"
        )
    shutil.rmtree(BUILT / "pieces", ignore_errors=True)
    (BUILT / "pieces").mkdir(parents=True)
    found = {group: wheels.download(group, replaced) for group in groups}
    streams = [
        (group, [_stream(one) for one in some if not wheels.is_among(one, there)]) for group, some in found.items()
    ]
    pieces = _cut(streams, stem, first=room, others=limit - SLACK)
    LIST.write_text(json.dumps([asdict(piece) for piece in pieces], indent=1) + "\n", encoding="utf-8")
    made: dict[Path, list[str]] = {}
    for name in dict.fromkeys([f"{stem}.1.tar.gz", *(piece.archive for piece in pieces)]):
        with tarfile.open(target.parent / name, "w:gz", compresslevel=6) as archive:
            if not made:
                with tarfile.open(fileobj=io.BytesIO(repository)) as committed:
                    for member in committed:
                        archive.addfile(member, committed.extractfile(member) if member.isfile() else None)
            for one in (LIST, *(piece.path for piece in pieces if piece.archive == name)):
                archive.add(one, arcname=str(one.relative_to(wheels.ROOT)))
        made[target.parent / name] = list(dict.fromkeys(piece.group for piece in pieces if piece.archive == name))
    return made


def _stream(wheel: Path) -> Path:
    """A wheel's files without what is left out, as a compressed tar file; made once.

    The names of its members begin with the distribution and its version.
    """
    name, version = wheels.identity(wheel)
    told = json.dumps([wheel.name, wheel.stat().st_size, LEFT_OUT.get(name), LEFT_OUT["*"]])
    path = BUILT / "streams" / f"{name}-{version}-{hashlib.sha256(told.encode()).hexdigest()[:12]}.tar.xz"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".part")
    with tarfile.open(aside, "w:xz", preset=6) as stream, zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            if info.is_dir() or is_left_out(name, info.filename):
                continue
            member = tarfile.TarInfo(f"{name}-{version}/{info.filename}")
            member.size, member.mode = info.file_size, (info.external_attr >> 16) & 0o777 or MODE
            with archive.open(info) as content:
                stream.addfile(member, content)
    aside.replace(path)
    return path


def _cut(streams: Sequence[tuple[str, Sequence[Path]]], stem: str, *, first: int, others: int) -> list[Piece]:
    """Fills one archive after the other with the groups' streams."""
    pieces: list[Piece] = []
    number, room = 1, first
    for group, paths in streams:
        index, joined = 0, _Joined(paths)
        while True:
            if room < READ:
                number, room = number + 1, others
            content = joined.read_up_to(room)
            if not content:
                break
            digest = hashlib.sha256(content).hexdigest()
            piece = Piece(group=group, number=index, archive=f"{stem}.{number}.tar.gz", sha256=digest)
            piece.path.write_bytes(content)
            pieces.append(piece)
            index, room = index + 1, room - len(content)
    return pieces


# -------------------------------------------------------------------------------------------------- put together there
def listed() -> dict[str, list[Piece]]:
    """The pieces of each group, in their order; empty where nothing was packed for this machine."""
    groups: dict[str, list[Piece]] = {}
    if LIST.exists() and sys.version_info[:2] == wheels.PYTHON:
        for one in json.loads(LIST.read_text(encoding="utf-8")):
            groups.setdefault(one["group"], []).append(Piece(**one))
    return groups


def missing(pieces: Sequence[Piece]) -> list[str]:
    """The archives that have not arrived, of one group's."""
    return sorted({piece.archive for piece in pieces if not piece.path.exists()})


def unpack(pieces: Sequence[Piece]) -> tuple[Path, list[str]]:
    """Unpacks the distributions of a group of which this Python has no version, or an older one.

    Args:
        pieces: all of the group.

    Returns:
        The folder, for ``PYTHONPATH``, and what was unpacked into it.

    Raises:
        ArchiveError: a piece is damaged, or of another pack.
    """
    for piece in pieces:
        if hashlib.sha256(piece.path.read_bytes()).hexdigest() != piece.sha256:
            raise ArchiveError(
                f"{piece.path} is not the piece that its list names: unpack {piece.archive} again, of the same pack as "
                f"the other archives"
            )
    digest = hashlib.sha256("".join(piece.sha256 for piece in pieces).encode()).hexdigest()[:16]
    # its last name tells libraries that look at paths that this is nobody's own code
    folder = BUILT / "unpacked" / f"{pieces[0].group}-{digest}" / "site-packages"
    names = folder / ".unpacked"
    if not names.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        names.write_text("\n".join(sorted(_extract(pieces, folder))), encoding="utf-8")
    return folder, names.read_text(encoding="utf-8").split()


def _extract(pieces: Sequence[Piece], folder: Path) -> set[str]:
    """Extracts what this Python lacks; returns its names and versions."""
    wanted: dict[str, bool] = {}
    joined = _Joined([piece.path for piece in pieces])
    # one archive of a wheel follows another's end
    with lzma.open(joined) as content, tarfile.open(fileobj=content, mode="r|", ignore_zeros=True) as stream:
        for member in stream:
            wheel, _, name = member.name.partition("/")
            if wheel not in wanted:
                wanted[wheel] = wheels.is_newer(*wheel.rsplit("-", 1))
            if wanted[wheel]:
                member.name = str(PurePosixPath(name))
                stream.extract(member, folder, filter="data")
    return {wheel for wheel, is_wanted in wanted.items() if is_wanted}


class _Joined(io.RawIOBase):
    """Files as one that is read once, from the beginning."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._chunks = self._read(paths)
        self._left = b""

    @staticmethod
    def _read(paths: Sequence[Path]) -> Iterator[bytes]:
        for path in paths:
            with path.open("rb") as file:
                while content := file.read(READ):
                    yield content

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._left = self._left or next(self._chunks, b"")
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def read_up_to(self, size: int) -> bytes:
        """So many bytes; less at the end."""
        chunks = []
        while size and (chunk := self.read(size)):
            chunks.append(chunk)
            size -= len(chunk)
        return b"".join(chunks)
