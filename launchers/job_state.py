"""Asks Slurm how a job is doing. ``scontrol`` knows live and recent jobs, ``sacct`` older ones, where it is set up."""

import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

POLL_S = 2.0
ASK_TIMEOUT_S = 30.0
PATIENCE_S = 300.0
"""For a controller that does not answer, or no longer knows a job."""

GOOD = "COMPLETED"
ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        GOOD,
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "TIMEOUT",
        "REVOKED",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """Of one job.

    Attributes:
        name: Slurm's word, such as ``RUNNING``.
        exit_status: of the batch script.
        reason: why it waits or failed; ``None`` where Slurm gives none.
        restarts: how often it was put back into the queue.
    """

    name: str
    exit_status: int = 0
    reason: str = ""
    restarts: int = 0

    @property
    def has_ended(self) -> bool:
        """It will not go on. A job that is put back into the queue is PENDING for a moment, not ended."""
        return self.name in ENDED

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.reason not in ("", "None") else ""
        again = f", restart {self.restarts}" if self.restarts else ""
        return f"{self.name}{why}{again}"


def job_state(job_id: str) -> JobState | None:
    """None where neither command knows the job."""
    shown = _ask(["scontrol", "show", "job", "-o", job_id])
    if shown and (name := _field(shown, "JobState")):
        return JobState(
            name=name,
            exit_status=_status(_field(shown, "ExitCode")),
            reason=_field(shown, "Reason"),
            restarts=int(_field(shown, "Restarts") or 0),
        )
    listed = _ask(["sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State,ExitCode"])
    if listed:
        state, _, exit_code = listed.splitlines()[-1].partition("|")
        return JobState(name=state.split()[0] if state else "", exit_status=_status(exit_code))
    return None


def wait_for(job_id: str, say: Callable[[str], None]) -> JobState | None:
    """Until the job has ended, telling every change; None where Slurm has lost it."""
    told, last_seen = "", time.monotonic()
    while True:
        state = job_state(job_id)
        if state is not None:
            last_seen = time.monotonic()
            if str(state) != told:
                told = str(state)
                say(f"job {job_id}: {told}")
            if state.has_ended:
                return state
        elif time.monotonic() - last_seen > PATIENCE_S:
            return None
        time.sleep(POLL_S)


def _ask(command: list[str]) -> str:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


def _field(text: str, name: str) -> str:
    found = re.search(rf"(?:^| ){name}=(\S*)", text)
    return found.group(1) if found else ""


def _status(exit_code: str) -> int:
    """``3:0`` is status 3; ``0:9`` was killed by signal 9."""
    status, _, signal = exit_code.partition(":")
    return int(status or 0) or (128 + int(signal) if signal.isdigit() and int(signal) else 0)
