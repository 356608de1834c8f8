"""No sandbox: programs run as this user, with limits of time and memory only; for trusted programs and debugging."""

import sys
import tempfile
from pathlib import Path

from gtpo_megatron.sandbox.packages import packages_for
from gtpo_megatron.sandbox.protocol import Job, Outcome
from gtpo_megatron.sandbox.server import ProgramServer


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
        self._server = ProgramServer([], python=sys.executable, is_isolated=False, packages=(self._packages.name,))

    def run(self, job: Job) -> Outcome:
        """Runs a job, see ``Sandbox``."""
        return self._server.run(job)

    def close(self) -> None:
        """Ends all of its processes."""
        self._server.close()
        self._packages.cleanup()
