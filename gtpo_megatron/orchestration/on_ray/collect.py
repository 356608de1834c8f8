"""Waits for remote calls under a deadline, and names the processes that failed."""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from gtpo_megatron.errors import GTPOError, WorkerError
from gtpo_megatron.supervision.deaths import Death

GRACE_S = 10.0
"""Wait after the first failure: peers of a dead process may report their broken collectives before its death."""

CHECK_S = 1.0
"""Seconds between two calls of the checks while waiting."""

SHOWN_NAMES = 4
"""Processes of many that are named as dead, and as silent."""

MAX_REASON_CHARACTERS = 400
"""Length to which reasons are cut."""

SAYS_NOTHING = (
    "The actor died unexpectedly before finishing this task",
    "The actor never ran",
    *(f"{field}:" for field in ("class_name", "actor_id", "pid", "name", "namespace", "ip")),
)
"""Starts of lines of Ray's messages that do not contain the reason."""

_FULL = re.compile(r"Memory on the node \(.*?\) was ([\d.]+)GB used / ([\d.]+)GB limit \(([\d.]+)\)")
_USER = re.compile(r"^(\d+)\t([\d.]+)\t(.+)$", re.MULTILINE)
_NAMES = {"ray::EngineProcess": "rollout engine", "ray::RankProcess": "rank", "ray::RewardProcess": "reward process"}
SHOWN_USERS, SHOWN_COMMAND = 3, 60
"""Processes that are named as those with most of the memory, and characters of their commands."""

_checks: list[Callable[[], None]] = []  # of this process, for every wait


@contextmanager
def checked_while_waiting(check: Callable[[], None]) -> Iterator[None]:
    """Within the block, every wait of this process calls ``check`` at once and every second; it may raise."""
    _checks.append(check)
    try:
        yield
    finally:
        _checks.remove(check)


class Deadline:
    """One limit for several waits, from its creation on.

    Args:
        limit_s: seconds for all waits together.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._end = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds that are left; 0 if none are."""
        return max(0.0, self._end - time.monotonic())

    def extend(self, seconds: float) -> None:
        """Gives back seconds that were spent on something else."""
        self._end += seconds


def collect(
    calls: Mapping[str, Any],
    *,
    stage: str,
    deadline_s: float | Deadline,
    answered: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Returns the results by name of remote calls that depend on each other.

    Args:
        calls: name of the process -> Ray reference of its call.
        stage: their stage, for messages.
        deadline_s: longest time to wait for all of them, or what is left of a limit that they share with other calls.
        answered: called with the name of each process that has answered.

    Raises:
        WorkerError: a process died, raised, or has not answered in time; the message names it, first those that died,
            and beside them those that have not answered.
        GTPOError: the error that a process raised, if none died.
    """
    shared = deadline_s if isinstance(deadline_s, Deadline) else Deadline(deadline_s)
    wait = _wait if answered is None else partial(_wait, answered=answered)
    results, failures, late = wait(calls, deadline_s=shared.left_s, grace_s=GRACE_S)
    if failures or late:
        _raise_worst(failures, late, stage, shared.limit_s)
    return results


def collect_survivors(
    calls: Mapping[str, Any], *, stage: str, deadline_s: float
) -> tuple[dict[str, Any], frozenset[str]]:
    """Returns the results of independent remote calls, also if some processes die.

    Returns:
        Results by name, and the names of those that died.

    Raises:
        WorkerError: a process raised, or has not answered in time.
        GTPOError: as in ``collect``.
    """
    results, failures, late = _wait(calls, deadline_s=deadline_s, grace_s=deadline_s)
    dead = frozenset(name for name, error in failures.items() if _is_death(error))
    others = {name: error for name, error in failures.items() if name not in dead}
    if others or late:
        _raise_worst(others, late, stage, deadline_s)
    return results, dead


def collect_next(calls: Mapping[str, Any], *, stage: str, deadline_s: float) -> tuple[dict[str, Any], frozenset[str]]:
    """Like ``collect_survivors``, but waits only until a first call has ended.

    Returns:
        Results by name, and the names of those that died; of at least one call together.
    """
    ready, _ = _first(list(calls.values()), deadline=time.monotonic() + deadline_s)
    if not ready:
        _raise_worst({}, sorted(calls), stage, deadline_s)
    ended = {name: reference for name, reference in calls.items() if reference in ready}
    return collect_survivors(ended, stage=stage, deadline_s=deadline_s)


def _wait(
    calls: Mapping[str, Any],
    *,
    deadline_s: float,
    grace_s: float,
    answered: Callable[[str], None] | None = None,
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Results and failures by name, and names of late calls; waits at most ``grace_s`` after the first failure."""
    import ray

    names = {reference: name for name, reference in calls.items()}
    pending = list(names)
    results: dict[str, Any] = {}
    failures: dict[str, Any] = {}
    deadline = time.monotonic() + deadline_s
    while pending and time.monotonic() < deadline:
        ready, pending = _first(pending, deadline=deadline)
        for reference in ready:
            try:
                results[names[reference]] = ray.get(reference)
                if answered is not None:
                    answered(names[reference])
            except ray.exceptions.RayError as error:
                if not failures:
                    deadline = min(deadline, time.monotonic() + grace_s)
                failures[names[reference]] = error
    return results, failures, sorted(names[reference] for reference in pending)


def _first(pending: list[Any], *, deadline: float) -> tuple[list[Any], list[Any]]:
    """Like ``ray.wait`` for one call, with the checks of ``checked_while_waiting`` before and during the wait."""
    import ray

    while True:
        for check in tuple(_checks):
            check()
        left = deadline - time.monotonic()
        ready, others = ray.wait(pending, num_returns=1, timeout=max(0.0, min(left, CHECK_S)))
        if ready or left <= CHECK_S:
            return ready, others


def _is_death(error: Any) -> bool:
    import ray

    # the second one of a call during which Ray's memory monitor has ended the actor
    return isinstance(error, ray.exceptions.RayActorError | ray.exceptions.OutOfMemoryError)


def _raise_worst(failures: dict[str, Any], late: list[str], stage: str, deadline_s: float) -> NoReturn:
    """Raises for processes that died, else for a GTPOError, else for late ones, else for any error."""
    if not failures:
        raise WorkerError(
            f"{', '.join(late)}: no answer in {stage} within {deadline_s:.0f} s; hung, or the deadline is too short"
        )
    died = sorted(name for name, error in failures.items() if _is_death(error))
    if died:
        # a rank that hangs lives, and those that wait for it are ended by NCCL's watchdog: it must not be left out
        silent = f"; {_some(late)} did not answer: hung, or waiting for what died" if late else ""
        why = _why({name: failures[name] for name in died}, is_alone=len(died) == 1 and not late)
        raise WorkerError(f"{_some(died)} died in {stage}{silent}{why}")
    causes = {name: getattr(error, "cause", None) or error for name, error in failures.items()}
    for name, cause in causes.items():
        if isinstance(cause, GTPOError):
            raise type(cause)(f"{name}, in {stage}: {cause}") from cause
    name, cause = next(iter(causes.items()))
    if late:
        raise WorkerError(
            f"{', '.join(late)} did not answer in {stage}; {name} gave up waiting: {type(cause).__name__}: {cause}"
        ) from cause
    raise WorkerError(f"{name} raised in {stage}: {type(cause).__name__}: {cause}") from cause


def _some(names: Sequence[str]) -> str:
    """The first names; after them a message has room for the reason, also where it is cut."""
    shown = [*names[:SHOWN_NAMES], *([f"and {len(names) - SHOWN_NAMES} more"] if len(names) > SHOWN_NAMES else [])]
    return ", ".join(shown)


def _why(deaths: Mapping[str, Any], *, is_alone: bool) -> str:
    """The reason of a death by Ray, for the end of a message; of a process that failed to start, if there is one.

    Args:
        deaths: Ray's errors by name.
        is_alone: the message has no other name than the one of this death.
    """
    raised = [name for name, error in deaths.items() if getattr(error, "actor_init_failed", False)]
    killed = [name for name, error in deaths.items() if memory_kill(str(error))]
    name = next(iter(raised or killed or deaths))
    reason = last_line(str(deaths[name]))
    whose = ": " if is_alone else f"; {name}: "
    if killed and not raised:
        where = "end what else runs there, or lower rollout.kv_cache_mib, rollout.max_concurrent_sequences"
    else:
        where = "see log.txt" if raised else "see log.txt, and the system log for an out-of-memory kill"
    return f"{whose}{reason}; {where}" if reason else f"; {where}"


def memory_kill(message: str) -> str:
    """How full the machine was and who had most of it, if Ray's memory monitor has ended a process; else ""."""
    full = _FULL.search(message)
    if full is None:
        return ""
    used, total, share = full.groups()
    users = [
        f"{_NAMES.get(command.partition('.')[0], command[:SHOWN_COMMAND].strip())} {gb} GB (process {pid})"
        for pid, gb, command in _USER.findall(message)[:SHOWN_USERS]
    ]
    most = f"; most of it had {', '.join(users)}" if users else ""
    return f"its machine's memory was {100 * float(share):.0f}% full ({used} of {total} GB), so Ray ended it{most}"


def last_line(message: str) -> str:
    """The last line of Ray's message that has the reason of a death; "" if there is none.

    In a traceback that is the exception, of Ray's memory monitor what ``memory_kill`` says. The result has no colours
    and at most ``MAX_REASON_CHARACTERS``.
    """
    if killed := memory_kill(message):
        return killed
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", message).splitlines()]
    telling = [line for line in lines if re.search(r"\w", line) and not line.startswith(SAYS_NOTHING)]
    line = telling[-1] if telling else ""
    return line if len(line) <= MAX_REASON_CHARACTERS else f"{line[:MAX_REASON_CHARACTERS].rstrip()} ..."


def explained(error: Exception, cause: Death | None) -> Exception:
    """The error to end a run with: the death that explains another one, unless that names it already.

    Args:
        error: error that a stage raised.
        cause: the death that was seen on this machine, if any.
    """
    if cause is None or str(error).startswith(str(cause)):
        return error
    if isinstance(error, GTPOError):
        before, died, _ = str(error).partition(" died in ")
        named = {name.strip() for name in re.sub(r" \([^)]*\)", "", before).split(",")} if died else set()
        is_same = named == {cause.name} and f" died in {cause.stage}" in str(error)
        if is_same or (cause.name in named and "exit status" in cause.how):  # it has raised, and Ray knows what
            return error
    return WorkerError(f"{cause.line}; what came of it: {last_line(str(error))}")
