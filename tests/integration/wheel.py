"""An environment that has the package's wheel, and the checkout's libraries without the checkout itself."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("gtpo_megatron", "launchers", "recipes")
BUILD = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"


def tracked_files() -> list[str]:
    """Files of the checkout, those not yet added included, by their paths from its root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in listed if (ROOT / name).is_file()]


def build_wheel(folder: Path) -> Path:
    """Builds the wheel as pip does, from a copy of the checkout, without a network."""
    source = folder / "source"
    for name in tracked_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    built = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)], cwd=source, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr[-3000:]
    return folder / built.stdout.splitlines()[-1]


def names_in(wheel: Path) -> set[str]:
    """Files of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


class Installed:
    """A new environment with the wheel, and an empty folder to stand in.

    Args:
        wheel: to install, without its dependencies: those are found in this environment's libraries.
        folder: to make both in.
    """

    def __init__(self, wheel: Path, folder: Path) -> None:
        self.bin, self.cwd = folder / "environment" / "bin", folder / "empty"
        self.cwd.mkdir()
        uv = shutil.which("uv") or str(ROOT / ".uv" / "bin" / "uv")
        environment = self.bin.parent
        for command in (
            [uv, "venv", "--quiet", "--offline", "--python", sys.executable, str(environment)],
            [uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", str(environment), str(wheel)],
        ):
            subprocess.run(command, check=True, capture_output=True, text=True)
        self.packages = Path(
            self.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
        )
        # a folder on the path: files such as the editable install's .pth are read in site folders only
        (self.packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")

    def run(self, program: str, *arguments: str, timeout_s: float = 400.0) -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment in the empty folder; it must succeed."""
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(
            [str(self.bin / program), *arguments],
            cwd=self.cwd,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        assert done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        return done
