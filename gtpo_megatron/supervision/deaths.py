"""Deaths of a run's processes: whose they are, which of them end the run, and which of several is named."""

import math
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

GCS = "Ray's GCS"
RAYLET = "Ray's raylet"
RAY = (GCS, RAYLET)  # without which calls of Ray fail, hang, or end the driver
AGENTS = ("Ray's dashboard agent", "Ray's runtime environment agent")  # with any of which a raylet ends

OWN_WORDS_S = 8.0  # for a stage to report a death itself: a rank that raised has the reason

_OF_RAY = {
    "gcs/gcs_server": GCS,
    "raylet/raylet": RAYLET,
    "ray::DashboardAgent": AGENTS[0],
    "dashboard/agent.py": AGENTS[0],
    "ray::RuntimeEnvAgent": AGENTS[1],
    "runtime_env/agent/main.py": AGENTS[1],
}
"""Suffix of the program's or script's path, or title -> name."""


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a process.

    Attributes:
        name: name of the process in messages.
        pid: process id.
        at: moment when it was seen, of ``time.monotonic``.
        stage: stage of the run at that moment.
        how: description, as far as known.
    """

    name: str
    pid: int
    at: float
    stage: str
    how: str

    def __str__(self) -> str:
        """The death and its stage."""
        return f"{self.name} (process {self.pid}) {self.how} in {self.stage}"

    @property
    def line(self) -> str:
        """What a run that ends with it says."""
        where = "see log.txt, and the system log for an out-of-memory kill"
        return f"{self}; {where}; --resume goes on from the last checkpoint"

    @property
    def patience_s(self) -> float | None:
        """How long a stage may continue after it; infinite if an engine can be replaced; None: it does not matter."""
        if self.name.startswith("checkpoint writer "):
            return None  # its rank reports its death, and it also ends normally
        if self.name.startswith(("rollout engine", "worker ")):
            return math.inf
        return 0.0 if self.name in RAY else OWN_WORDS_S


def how_ended(exit_code: int) -> str:
    """Describes an exit code of ``waitpid``; 0 may mean unknown, since only a parent can read it."""
    if number := exit_code & 0x7F:
        return "died by " + next((one.name for one in signal.Signals if one == number), f"signal {number}")
    return f"died (exit status {exit_code >> 8})" if exit_code else "died"


def is_of(name: str, owner: str) -> bool:
    """Whether a process is the named one or one of its workers."""
    return name == owner or name.endswith(f" of {owner}")


def named_death(deaths: Iterable[Death]) -> Death | None:
    """The death that explains the end of a run: the first one of Ray's, with which all others end; else the first.

    Agents end with a raylet that a signal has ended; a raylet that has ended otherwise follows its agent.
    """
    ending = [death for death in deaths if death.patience_s is not None]
    if any(death.name == RAYLET and "by SIG" in death.how for death in ending):
        ending = [death for death in ending if death.name not in AGENTS]
    of_ray = [death for death in ending if death.name in (*RAY, *AGENTS)]
    return min(of_ray or ending, key=lambda death: (death.at, death.name not in AGENTS), default=None)


def name_of(command: Sequence[str], parent: str) -> str:
    """The name of a process that the driver has not named; may be empty.

    Args:
        command: arguments or title of the process.
        parent: name of its parent, which a fork has not got though it may have its title.
    """
    title = command[0] if command else ""
    if parent.startswith("rank ") and title.startswith("ray::"):  # a fork still has the rank's title
        return f"checkpoint writer of {parent}"
    if parent.startswith("rollout engine") and title.startswith("VLLM::Worker"):
        number = re.search(r"TP(\d+)", title)
        return f"worker {number[1] if number else 0} of {parent}"
    programs = (one for one in command[:4] if not one.startswith("-"))  # those and later ones may be other paths
    name = next((name for one in programs for ending, name in _OF_RAY.items() if one.endswith(ending)), "")
    return "" if name == parent else name
