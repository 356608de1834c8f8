"""No sandbox: programs run as this user, with limits of time and memory only; for trusted programs and debugging."""

import sys

from gtpo_megatron.sandbox.keeper import Keeper
from gtpo_megatron.sandbox.protocol import Job, Outcome


class UnsafeSandbox:
    """Runs programs as this user; they can read and write what the user can."""

    def __init__(self) -> None:
        self._keeper = Keeper([], python=sys.executable, is_isolated=False)

    def run(self, job: Job) -> Outcome:
        """Runs a job, see ``Sandbox``."""
        return self._keeper.run(job)

    def close(self) -> None:
        """Ends all of its processes."""
        self._keeper.close()
