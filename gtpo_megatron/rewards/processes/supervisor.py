"""The supervisor, a small process between the pool and a grading process, which ends all descendants of the latter.

It is the subreaper of its descendants (``PR_SET_CHILD_SUBREAPER``): an orphan, even in another session, becomes its
child instead of init's, and is found and killed.
"""

import ctypes
import os
import resource
import select
import signal

from gtpo_megatron.rewards.processes.process_tree import end_descendants

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

ORPHAN_CHECK_S = 1.0
"""Interval of checks that the parent lives, in case another process holds the pipe open."""


def supervise(*, control: int, connection: int, parent: int) -> None:
    """Forks, and returns only in the child, which becomes the grading process.

    The parent process ends the child and its descendants when the child ends, when ``control`` is closed at its other
    end, or when the pool's process ends; its exit status is the child's. Call it while the process has one thread.

    Args:
        control: a pipe that the pool holds open while the worker may live.
        connection: the child's connection to the pool.
        parent: the pool's process.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    worker = os.fork()
    if worker == 0:
        os.close(control)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # the supervisor was killed before the line above
            os._exit(1)
        return
    os.close(connection)
    has_ended = _wait(worker, control=control, parent=parent)
    end_descendants(supervisor)
    _leave_with(has_ended if has_ended is not None else os.waitpid(worker, 0)[1])


def _wait(worker: int, *, control: int, parent: int) -> int | None:
    """The worker's exit status; None if it must be ended."""
    poll = select.poll()
    poll.register(os.pidfd_open(worker), select.POLLIN)
    poll.register(control, select.POLLIN | select.POLLHUP)
    while os.getppid() == parent:
        ready = poll.poll(ORPHAN_CHECK_S * 1000)
        if (status := _reap(worker)) is not None:
            return status
        if any(descriptor == control for descriptor, _ in ready):
            return None
    return None


def _reap(worker: int) -> int | None:
    """Reaps ended children, including adopted orphans; returns the worker's status."""
    found = None
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if process == 0:
            return found
        if process == worker:
            found = status


def _leave_with(status: int) -> None:
    """Ends this process with the worker's status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
