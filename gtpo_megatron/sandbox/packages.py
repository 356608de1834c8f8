"""Packages beyond the standard library that a program in the sandbox may import: a folder of yours, or a short list."""

import importlib.util
import os
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from gtpo_megatron.errors import SandboxError

DEFAULT = ("numpy", "sortedcontainers")
"""Packages that programs have of this installation if ``reward.packages`` names no folder."""

COMPILED = ("numpy",)
"""Those of them that another version of Python could not import."""

FRAMEWORK = (
    "pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments", "pytest_asyncio", "pytest_mock",
    "typing_extensions", "exceptiongroup", "tomli",
)  # fmt: skip
"""What runs tests in Python: pytest with what it imports, and two plugins; all of it pure Python."""


def framework(copies: Path | None = None) -> dict[str, Path]:
    """The packages of :data:`FRAMEWORK` that are installed here, by the names under which they are put into a folder.

    Their folders of metadata go along, because one asks for its own version.

    Args:
        copies: a folder for copies of what another user may not read, should this process be root, whose sandbox is
            another user's; None: they are taken as they are.
    """
    found: dict[str, Path] = {}
    for name in FRAMEWORK:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue
        path = Path(spec.origin).resolve()
        path = path.parent if path.name == "__init__.py" else path
        for one in (path, *path.parent.glob(f"{name}-*.dist-info")):
            is_open = copies is None or os.geteuid() != 0 or is_open_to_all(one if one.is_dir() else one.parent)
            found[one.name] = one if is_open or copies is None else _copy(one, copies / one.name)
    return found


def _copy(path: Path, target: Path) -> Path:
    """A copy that every user may read."""
    target.parent.chmod(0o755)
    if path.is_dir():
        shutil.copytree(path, target)
    else:
        shutil.copy(path, target)
    for one in (target, *target.rglob("*")):
        one.chmod(0o755 if one.is_dir() else 0o644)
    return target


def packages_for(folder: str, python: Path) -> dict[str, Path]:
    """Files and folders by the names under which they are put into one folder of the sandbox.

    Args:
        folder: as in ``RewardConfig.packages``.
        python: the interpreter that is to import them.

    Raises:
        SandboxError: there is no such folder, or the user of the sandbox may not read it.
    """
    if folder:
        path = Path(folder).resolve()
        if not path.is_dir():
            raise SandboxError(
                f"reward.packages={folder!r}: no such folder; make it by pip install --target {folder} numpy"
            )
        if os.geteuid() == 0 and not is_open_to_all(path):
            raise SandboxError(f"reward.packages={folder!r}: as root, every user must be able to read it and all above")
        return {
            entry.name: entry for entry in sorted(path.iterdir()) if entry.is_dir() or entry.suffix in (".py", ".so")
        }
    found: dict[str, Path] = {}
    for name in DEFAULT:
        if name in COMPILED and _version(str(python)) != _version(sys.executable):
            continue
        spec = importlib.util.find_spec(name)
        places = list(spec.submodule_search_locations or []) if spec is not None else []
        if not places or (os.geteuid() == 0 and not is_open_to_all(Path(places[0]).resolve())):
            continue
        path = Path(places[0]).resolve()
        libraries = path.with_name(f"{name}.libs")
        found |= {one.name: one for one in (path, libraries) if one.is_dir()}
    return found


def is_open_to_all(path: Path) -> bool:
    """Whether every user may read a file or folder, and enter the folders above it."""
    return all(one.stat().st_mode & 0o005 == 0o005 for one in (path, *path.parents))


@lru_cache(maxsize=4)
def _version(python: str) -> str:
    """Major and minor version of an interpreter; "" if it does not say."""
    if python == sys.executable:
        return f"{sys.version_info[0]}.{sys.version_info[1]}"
    command = [python, "-I", "-S", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30.0, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
