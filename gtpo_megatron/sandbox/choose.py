"""The sandbox that ``reward.sandbox`` names, opened when the first program comes; and the unsafe one, which is none."""

import sys
import tempfile
from pathlib import Path

from gtpo_megatron.errors import ConfigError, SandboxError
from gtpo_megatron.sandbox.bubblewrap import BubblewrapSandbox, check_bubblewrap
from gtpo_megatron.sandbox.http_service import HttpSandbox
from gtpo_megatron.sandbox.packages import framework, packages_for
from gtpo_megatron.sandbox.protocol import Job, Outcome, Sandbox
from gtpo_megatron.sandbox.server import ProgramServers


def open_sandbox(name: str, packages: str = "") -> Sandbox:
    """Opens ``bubblewrap``, ``unsafe``, or the service at a URL.

    Raises:
        SandboxError: bubblewrap is not installed, or there is no such folder of packages.
    """
    if name == "bubblewrap":
        return BubblewrapSandbox(packages)
    return UnsafeSandbox(packages) if name == "unsafe" else HttpSandbox(name)


def check_sandbox(name: str, packages: str = "") -> None:
    """Raises ConfigError if programs cannot be run so, with these packages, on this machine."""
    try:
        if name == "bubblewrap":
            check_bubblewrap(packages)
        elif name == "unsafe":
            packages_for(packages, Path(sys.executable))
    except SandboxError as error:
        raise ConfigError(f"reward.sandbox={name!r}: {error}") from error


class LazySandbox:
    """A sandbox that is opened with its first job.

    Args:
        name: as in :func:`open_sandbox`.
        packages: as in ``RewardConfig.packages``.
    """

    def __init__(self, name: str, packages: str = "") -> None:
        self._name = name
        self._packages = packages
        self._sandbox: Sandbox | None = None

    def run(self, job: Job) -> Outcome:
        """Runs a job, see ``Sandbox``."""
        if self._sandbox is None:
            self._sandbox = open_sandbox(self._name, self._packages)
        return self._sandbox.run(job)

    def close(self) -> None:
        """Ends all of its processes."""
        if self._sandbox is not None:
            self._sandbox.close()


class UnsafeSandbox:
    """Runs programs as this user; they can read and write what the user can.

    Args:
        packages: as in ``RewardConfig.packages``.

    Raises:
        SandboxError: the folder of packages is not there.
    """

    def __init__(self, packages: str = "") -> None:
        found = packages_for(packages, Path(sys.executable))
        self._packages = tempfile.TemporaryDirectory(prefix="packages-")
        for name, path in found.items():
            (Path(self._packages.name) / name).symlink_to(path)
        self._framework = tempfile.TemporaryDirectory(prefix="framework-")
        for name, path in framework().items():
            (Path(self._framework.name) / name).symlink_to(path)
        self._servers = ProgramServers(
            [],
            python=sys.executable,
            is_isolated=False,
            packages=(self._packages.name,),
            framework=(self._framework.name,),
        )

    def run(self, job: Job) -> Outcome:
        """Runs a job, see ``Sandbox``."""
        return self._servers.run(job)

    def close(self) -> None:
        """Ends all of its processes."""
        self._servers.close()
        self._packages.cleanup()
        self._framework.cleanup()
