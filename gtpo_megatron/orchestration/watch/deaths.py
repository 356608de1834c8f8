"""Who of a run's processes died first: of several deaths, the one that the others follow from."""

import signal
from collections.abc import Iterable
from dataclasses import dataclass

GCS = "Ray's GCS"
RAYLET = "Ray's raylet"
DASHBOARD_AGENT = "Ray's dashboard agent"
RUNTIME_ENV_AGENT = "Ray's runtime environment agent"

RAY = (GCS, RAYLET)
"""Without one of these nothing can be asked of Ray any more, and some calls would end or hang the driver."""

AGENTS = (DASHBOARD_AGENT, RUNTIME_ENV_AGENT)
"""A raylet ends when one of its agents does."""

AGENT_S = 60.0
"""How long a raylet may go on without an agent."""

AT_ONCE_S = 1.5
"""Deaths closer than this may have been seen in another order than they came."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """The end of a process, or that it does not run though it is there.

    Attributes:
        name: of the process, as messages call it.
        pid: of it.
        at: seconds on the clock of whoever saw it.
        stage: that the run was in.
        how: in words, as far as it can be known.
        is_stop: it was stopped by a signal (SIGSTOP) and has not gone on.
    """

    name: str
    pid: int
    at: float
    stage: str
    how: str
    is_stop: bool = False

    def __str__(self) -> str:
        """What happened, in which stage."""
        return f"{self.name} (process {self.pid}) {self.how} in {self.stage}"


def how_ended(exit_code: int) -> str:
    """Words for what ``waitpid`` says; 0 is unknown as well, since only a parent may know."""
    if exit_code & 0x7F:
        number = exit_code & 0x7F
        try:
            return f"died by {signal.Signals(number).name}"
        except ValueError:
            return f"died by signal {number}"
    return f"died (exit status {exit_code >> 8})" if exit_code else "died"


def is_essential(death: Death) -> bool:
    """Whether a run cannot go on so, or not without replacing the process: others may come and go."""
    if death.name.startswith("checkpoint writer "):
        return death.is_stop  # one that dies is reported by its rank, and a good one ends as well
    return death.name in RAY or death.name.startswith(("rank ", "rollout engine", "reward process", "worker "))


def _is_cause(death: Death, deaths: Iterable[Death], now: float) -> bool:
    """A raylet ends with its agent, soon; one that goes on for longer can miss it, but for starting something."""
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
    """The cause: whoever died first, or has been stopped first.

    But a raylet takes its workers and agents along so fast that they may be seen first; only where an agent was, and
    no signal ended the raylet, the raylet went after its agent.

    Args:
        deaths: in any order.
        now: on the clock that saw them.
    """
    every = list(deaths)
    ordered = sorted((death for death in every if _is_cause(death, every, now)), key=lambda death: death.at)
    if not ordered:
        return None
    first = ordered[0]
    for death in ordered:
        if death.at - first.at > AT_ONCE_S:
            break
        if death.name == RAYLET and not (first.name in AGENTS and "by SIG" not in death.how):
            return death
    return first
