"""What a bare machine lacks: packed here with the repository, unpacked there without a package index."""

import hashlib
import importlib.metadata
import io
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

FOLDER = ROOT / "build" / "gpu_proof" / "wheels"
"""Where wheels lie, here and in the unpacked bundle; git ignores it."""

LARGEST_BUNDLE = 64 << 20

PYTHON, PLATFORMS = (3, 12), ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
"""Of the bare machine."""

MEGATRON = "megatron-core==0.19.2"
"""As the ``gpu`` extra has it, which a test compares."""

NEEDED = (
    MEGATRON,
    "einops",  # imported by Megatron
    "pydantic>=2.12,<3",  # configurations
    "psutil",
    "xxhash",
    # of pydantic, of rich (which checks and errors import) and of pytest with the project's tests
    "rich>=14",
    "pytest-timeout>=2.4",
    "hypothesis>=6.150",
    "cloudpickle>=3",
)
"""With what they need themselves; torch, Triton, transformers and pytest are there."""

THERE = ("torch", "triton", "transformers", "pytest", "numpy", "safetensors", "packaging")
"""Distributions that are never packed, whoever needs them."""


def pack(target: Path, wheel: Path | None) -> int:
    """Writes the bundle: the committed repository, and wheels for what a bare machine lacks.

    Args:
        target: the ``.tar.gz`` file.
        wheel: of megatron-core; None: the one of the ``gpu`` extra, from the package index.

    Returns:
        Its bytes.

    Raises:
        SystemExit: it is larger than 64 MiB, or a wheel cannot be had.
    """
    download(wheel)
    done = subprocess.run(["git", "archive", "--format=tar", "HEAD"], cwd=ROOT, capture_output=True, check=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target, "w:gz") as bundle:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            for member in archive:
                bundle.addfile(member, archive.extractfile(member) if member.isfile() else None)
        for one in sorted(FOLDER.glob("*.whl")):
            bundle.add(one, arcname=str(one.relative_to(ROOT)))
    size = target.stat().st_size
    if size > LARGEST_BUNDLE:
        raise SystemExit(f"{target} has {size / 2**20:.1f} MiB, more than {LARGEST_BUNDLE >> 20}")
    return size


def found(wheel: Path | None) -> list[Path]:
    """The wheels of the bundle, if they are for this Python; ``wheel`` in the place of its megatron-core."""
    packed = sorted(FOLDER.glob("*.whl")) if sys.version_info[:2] == PYTHON else []
    if wheel is None:
        return packed
    return [*(one for one in packed if _identity(one)[0] != "megatron-core"), wheel]


def download(wheel: Path | None) -> None:
    """Fills the folder of wheels; those that are already there are not asked for again."""
    wanted = "\n".join(NEEDED) + str(wheel)
    stamp = FOLDER / "downloaded"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    requirements = [one for one in NEEDED if wheel is None or one != MEGATRON]
    if wheel is not None:
        shutil.copy(wheel, FOLDER)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(FOLDER), "--only-binary", ":all:"]
    command += ["--python-version", ".".join(map(str, PYTHON)), *(f"--platform={one}" for one in PLATFORMS)]
    # Megatron and einops would bring torch and what it needs, gigabytes of it
    alone = [one for one in requirements if one.startswith(("megatron", "einops"))]
    others = [one for one in requirements if one not in alone]
    for some, options in ((alone, ["--no-deps"]), (others, [])):
        done = subprocess.run([*command, *options, *some], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"pip cannot download {', '.join(some)}:\n{done.stderr.strip()[-2000:]}")
    for one in FOLDER.glob("*.whl"):
        if _identity(one)[0] in THERE:
            one.unlink()
    stamp.write_text(wanted)


def unpack(wheels: Sequence[Path], into: Path) -> tuple[Path, list[str]]:
    """Unpacks the wheels of which this Python has no version, or an older one.

    Args:
        wheels: that the bundle has, and the one of megatron-core that was named.
        into: folder of such folders.

    Returns:
        The folder, for ``PYTHONPATH``, and what is in it.
    """
    chosen = [one for one in wheels if _is_newer(*_identity(one))]
    name = hashlib.sha256("\n".join(sorted(one.name for one in chosen)).encode()).hexdigest()[:16]
    folder = into / name
    if not (folder / ".complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for one in chosen:
            with zipfile.ZipFile(one) as archive:
                archive.extractall(folder)
        (folder / ".complete").touch()
    return folder, ["-".join(_identity(one)) for one in chosen]


def _identity(wheel: Path) -> tuple[str, str]:
    """Name of the distribution, as package indices spell it, and its version."""
    name, version, *_ = wheel.name.split("-")
    return re.sub(r"[-_.]+", "-", name).lower(), version


def _is_newer(name: str, version: str) -> bool:
    """Whether this Python has no version of a distribution, or one that is older."""
    try:
        return _numbers(importlib.metadata.version(name)) < _numbers(version)
    except importlib.metadata.PackageNotFoundError:
        return True


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.split("+")[0])]
