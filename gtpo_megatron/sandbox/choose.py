"""The sandbox that ``reward.sandbox`` names; and the unsafe one, which is none."""

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from gtpo_megatron.errors import ConfigError, SandboxError
from gtpo_megatron.sandbox.bubblewrap import BubblewrapSandbox, check_bubblewrap
from gtpo_megatron.sandbox.http_service import HttpSandbox
from gtpo_megatron.sandbox.packages import framework, packages_for
from gtpo_megatron.sandbox.protocol import Sandbox
from gtpo_megatron.sandbox.server import LocalSandbox, ServerSetup


def open_sandbox(name: str, packages: str = "") -> Sandbox:
    """``bubblewrap``, ``unsafe``, or the service at a URL; it has no process before its first job."""
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


class UnsafeSandbox(LocalSandbox):
    """Runs programs as this user; they can read and write what the user can.

    Args:
        packages: as in ``RewardConfig.packages``.
    """

    def __init__(self, packages: str = "") -> None:
        super().__init__()
        self._packages = packages

    def _prepared(self, folders: ExitStack) -> ServerSetup:
        made = []
        for found in (packages_for(self._packages, Path(sys.executable)), framework()):
            made.append(folders.enter_context(tempfile.TemporaryDirectory(prefix="packages-")))
            for name, path in found.items():
                (Path(made[-1]) / name).symlink_to(path)
        return ServerSetup(python=sys.executable, is_isolated=False, packages=made[:1], framework=made[1:])
