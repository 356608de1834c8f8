"""Waits for remote calls under a deadline and names whoever failed."""

import time
from collections.abc import Mapping
from typing import Any

from gtpo_megatron.errors import GTPOError, WorkerError

GRACE_S = 5.0
"""How long to listen on after the first failure: a dead process's peers may report their broken collectives first."""


def collect(calls: Mapping[str, Any], *, stage: str, deadline_s: float) -> dict[str, Any]:
    """The results of remote calls, by name.

    Args:
        calls: name of the process -> Ray reference of its call.
        stage: what they are doing, for the message.
        deadline_s: longest time to wait for all of them.

    Raises:
        WorkerError: a process died, raised, or has not answered in time; the message names it. A process that died is
            named before those that only lost their connection to it.
        GTPOError: of the type that a process raised on purpose, where none died.
    """
    import ray

    names = {reference: name for name, reference in calls.items()}
    pending = list(names)
    results: dict[str, Any] = {}
    failures: dict[str, Any] = {}
    deadline = time.monotonic() + deadline_s
    while pending and (left := deadline - time.monotonic()) > 0:
        ready, pending = ray.wait(pending, num_returns=1, timeout=left)
        for reference in ready:
            try:
                results[names[reference]] = ray.get(reference)
            except ray.exceptions.RayError as error:
                if not failures:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                failures[names[reference]] = error
    late = sorted(names[reference] for reference in pending)
    if failures:
        _raise_worst(failures, late, stage)
    if late:
        raise WorkerError(
            f"{', '.join(late)}: no answer in {stage} within {deadline_s:.0f} s; hung, or the deadline is too short"
        )
    return results


def _raise_worst(failures: dict[str, Any], late: list[str], stage: str) -> None:
    """Those that died first, then an error raised on purpose, then those that never answered their peers."""
    import ray

    died = sorted(name for name, error in failures.items() if isinstance(error, ray.exceptions.RayActorError))
    if died:
        raise WorkerError(
            f"{', '.join(died)} died in {stage}; see log.txt, and the system log for an out-of-memory kill"
        )
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
