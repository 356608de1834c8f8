"""Wheels for a bare machine: downloaded where there is a package index, compared with what a Python has."""

import hashlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_proof.needs import GROUPS, THERE

ROOT = Path(__file__).resolve().parents[2]

FOLDER = ROOT / "build" / "gpu_proof" / "wheels"

PYTHON = (3, 12)
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (35, 34, 31, 28, 27, 26, 24, 17, 12, 5)),
    *(f"manylinux{year}_x86_64" for year in ("2014", "2010", "1")),
)
"""Of the bare machine; pip matches each name as it is."""

WITH_DEPENDENCIES = ("pydantic", "rich", "pytest-timeout", "hypothesis")
"""Pure Python but for pydantic's core, whose version must be the one that it names. Others would bring torch with what
it needs, gigabytes of it."""


class WheelError(Exception):
    """A wheel cannot be had."""


def download(group: str, replaced: Sequence[str] = ()) -> list[Path]:
    """Fetches the wheels of a group; those that are already there are not asked for again.

    Args:
        group: of ``GROUPS``.
        replaced: requirements in the place of those of the same names.

    Raises:
        WheelError: pip cannot download one.
    """
    instead = {identity_of(one): one for one in replaced}
    wanted = [instead.get(identity_of(one), one) for one in GROUPS[group]]
    folder = FOLDER / f"{group}-{hashlib.sha256(repr(wanted).encode()).hexdigest()[:12]}"
    if not folder.exists():
        aside = folder.with_suffix(".part")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        whole = [one for one in wanted if identity_of(one) in WITH_DEPENDENCIES]
        for some, options in (([one for one in wanted if one not in whole], ["--no-deps"]), (whole, [])):
            if some:
                _pip_download(aside, some, options)
        for one in aside.glob("*.whl"):
            if identity(one)[0] in THERE:
                one.unlink()
        aside.rename(folder)
    return sorted(folder.glob("*.whl"))


def _pip_download(folder: Path, requirements: Sequence[str], options: Sequence[str]) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), "--only-binary", ":all:"]
    command += ["--python-version", ".".join(map(str, PYTHON)), *(f"--platform={one}" for one in PLATFORMS)]
    done = subprocess.run([*command, *options, *requirements], capture_output=True, text=True, check=False)
    if done.returncode:
        raise WheelError(f"pip cannot download {', '.join(requirements)}:\n{done.stderr.strip()[-2000:]}")


def identity(wheel: Path) -> tuple[str, str]:
    """Name of the distribution, as package indices spell it, and its version."""
    name, version, *_ = wheel.name.split("-")
    return identity_of(name), version


def identity_of(requirement: str) -> str:
    """A distribution's name as package indices spell it, of a requirement or another spelling."""
    return re.sub(r"[-_.]+", "-", re.split(r"[<>=!~\[ ]", requirement)[0]).lower()


def is_newer(name: str, version: str) -> bool:
    """Whether this Python has no version of a distribution, or one that is older."""
    try:
        return _numbers(importlib.metadata.version(name)) < _numbers(version)
    except importlib.metadata.PackageNotFoundError:
        return True


def is_among(wheel: Path, there: Sequence[str]) -> bool:
    """Whether lines ``name`` or ``name==version`` name this distribution, in no older version."""
    name, version = identity(wheel)
    found = {identity_of(line): line.partition("==")[2].strip() for line in there}
    return name in found and (not found[name] or _numbers(found[name]) >= _numbers(version))


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.split("+")[0])]
