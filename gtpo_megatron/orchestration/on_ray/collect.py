"""Waits for remote calls under a deadline and names whoever failed."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from gtpo_megatron.errors import GTPOError, WorkerError
from gtpo_megatron.orchestration.watch.reasons import last_line

GRACE_S = 10.0
"""How long to listen on after the first failure: a dead process's peers may report their broken collectives first."""

LOOK_S = 1.0
"""Between two looks, while waiting, whether what is waited for can still come."""

_looks: list[Callable[[], None]] = []


@contextmanager
def looking_after(look: Callable[[], None]) -> Iterator[None]:
    """While the block runs, whoever waits here calls ``look`` at once and every second, which may raise.

    Like Ray's own connection it holds for the whole process, so that no caller has to hand it on.
    """
    _looks.append(look)
    try:
        yield
    finally:
        _looks.remove(look)


def collect(calls: Mapping[str, Any], *, stage: str, deadline_s: float) -> dict[str, Any]:
    """The results of remote calls that need each other, by name.

    Args:
        calls: name of the process -> Ray reference of its call.
        stage: what they are doing, for the message.
        deadline_s: longest time to wait for all of them.

    Raises:
        WorkerError: a process died, raised, or has not answered in time; the message names it. A process that died is
            named before those that only lost their connection to it.
        GTPOError: of the type that a process raised on purpose, where none died.
    """
    results, failures, late = _wait(calls, deadline_s=deadline_s, grace_s=GRACE_S)
    if failures or late:
        _raise_worst(failures, late, stage, deadline_s)
    return results


def collect_survivors(
    calls: Mapping[str, Any], *, stage: str, deadline_s: float
) -> tuple[dict[str, Any], frozenset[str]]:
    """The results of remote calls that do not need each other: who lives goes on when another dies.

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
    calls: Mapping[str, Any], *, deadline_s: float, grace_s: float
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Results, failures, and who is late, by name; at most ``grace_s`` longer than the first failure."""
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
            except ray.exceptions.RayError as error:
                if not failures:
                    deadline = min(deadline, time.monotonic() + grace_s)
                failures[names[reference]] = error
    return results, failures, sorted(names[reference] for reference in pending)


def _first(pending: list[Any], *, deadline: float) -> tuple[list[Any], list[Any]]:
    """As ``ray.wait`` for one of them, with looks before and meanwhile: stages may be shorter than one."""
    import ray

    while True:
        for look in tuple(_looks):
            look()
        left = deadline - time.monotonic()
        ready, others = ray.wait(pending, num_returns=1, timeout=max(0.0, min(left, LOOK_S)))
        if ready or left <= LOOK_S:
            return ready, others


def _is_death(error: Any) -> bool:
    import ray

    return isinstance(error, ray.exceptions.RayActorError)


def _raise_worst(failures: dict[str, Any], late: list[str], stage: str, deadline_s: float) -> NoReturn:
    """Those that died first, then an error raised on purpose, then those that never answered their peers."""
    if not failures:
        raise WorkerError(
            f"{', '.join(late)}: no answer in {stage} within {deadline_s:.0f} s; hung, or the deadline is too short"
        )
    died = sorted(name for name, error in failures.items() if _is_death(error))
    if died:
        raise WorkerError(f"{', '.join(died)} died in {stage}{_why({name: failures[name] for name in died})}")
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


def _why(deaths: Mapping[str, Any]) -> str:
    """The end of a sentence that says who died: what Ray says about one of them.

    Rather about one whose own code raised at its start than about one that was killed.
    """
    raised = [name for name, error in deaths.items() if error.actor_init_failed]
    name = next(iter(raised or deaths))
    reason = last_line(str(deaths[name]))
    whose = f"; {name}: " if len(deaths) > 1 else ": "
    where = "see log.txt" if raised else "see log.txt, and the system log for an out-of-memory kill"
    return f"{whose}{reason}; {where}" if reason else f"; {where}"
