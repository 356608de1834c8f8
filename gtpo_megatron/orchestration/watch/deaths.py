"""Finds the cause among several deaths of a run's processes."""

import signal
from collections.abc import Iterable
from dataclasses import dataclass

GCS = "Ray's GCS"
RAYLET = "Ray's raylet"
DASHBOARD_AGENT = "Ray's dashboard agent"
RUNTIME_ENV_AGENT = "Ray's runtime environment agent"

RAY = (GCS, RAYLET)
"""Ray processes whose death makes calls of Ray fail, hang, or end the driver."""

AGENTS = (DASHBOARD_AGENT, RUNTIME_ENV_AGENT)
"""A raylet ends when one of its agents does."""

AGENT_S = 60.0
"""How long a raylet may live without an agent."""

AT_ONCE_S = 1.5
"""Deaths closer together may have been seen in another order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """The end of a process, or its stop by a signal.

    Attributes:
        name: name of the process in messages.
        pid: its process id.
        at: time in seconds, by the clock of the observer.
        stage: stage of the run at that time; several, joined by ``or``, if it changed before the death was seen.
        how: description, as far as known.
        is_stop: it was stopped by a signal (SIGSTOP) and has not continued.
    """

    name: str
    pid: int
    at: float
    stage: str
    how: str
    is_stop: bool = False

    @property
    def stages(self) -> list[str]:
        """The stages that ``stage`` names."""
        return self.stage.split(" or ")

    def __str__(self) -> str:
        """The event and its stage."""
        return f"{self.name} (process {self.pid}) {self.how} in {self.stage}"


def how_ended(exit_code: int) -> str:
    """Describes an exit code of ``waitpid``; 0 may mean unknown, since only a parent can read it."""
    if exit_code & 0x7F:
        number = exit_code & 0x7F
        try:
            return f"died by {signal.Signals(number).name}"
        except ValueError:
            return f"died by signal {number}"
    return f"died (exit status {exit_code >> 8})" if exit_code else "died"


def is_essential(death: Death) -> bool:
    """Whether the run cannot continue, or only after replacing the process."""
    if death.name.startswith("checkpoint writer "):
        return death.is_stop  # its rank reports its death, and it also ends normally
    return death.name in RAY or death.name.startswith(("rank ", "rollout engine", "reward process", "worker "))


def _is_cause(death: Death, deaths: Iterable[Death], now: float) -> bool:
    """Whether a death of an agent is the cause of its raylet's, which follows soon."""
    if death.name not in AGENTS:
        return is_essential(death)
    if death.is_stop:
        return death.stage == "start"
    ends = [other.at for other in deaths if other.name == RAYLET] or [now]
    return any(-AT_ONCE_S <= end - death.at <= AGENT_S for end in ends)


def is_of(name: str, owner: str) -> bool:
    """Whether a process is the named one or one of its workers."""
    return name == owner or name.endswith(f" of {owner}")


def first_death(deaths: Iterable[Death], *, now: float) -> Death | None:
    """The cause: the process that died or was stopped first.

    A raylet's workers and agents end with it so fast that they may be seen first. If an agent was seen first,
    or both in one scan, and no signal ended the raylet, the agent is the cause.

    Args:
        deaths: deaths in any order.
        now: time by the clock of the observer.
    """
    every = list(deaths)
    causes = [death for death in every if _is_cause(death, every, now)]
    # of deaths seen in one scan the agent is first; a raylet ended by a signal is found below
    ordered = sorted(causes, key=lambda death: (death.at, death.name not in AGENTS))
    if not ordered:
        return None
    first = ordered[0]
    for death in ordered:
        if death.at - first.at > AT_ONCE_S:
            break
        if death.name == RAYLET and not (first.name in AGENTS and "by SIG" not in death.how):
            return death
    return first
