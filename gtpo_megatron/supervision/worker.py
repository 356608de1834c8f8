"""The supervisor above a worker that runs foreign code: whatever the worker starts ends with it."""

import contextlib
import ctypes
import os
import re
import resource
import select
import signal
from pathlib import Path

from gtpo_megatron.supervision.process_tree import descendants, end_all

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36  # orphaned descendants, even in another session, become its children instead of init's

END_PATIENCE_S = 5.0  # for killed processes to end
REAP_EVERY_S = 1.0  # between two looks at orphans that this process has adopted


def supervise(*, control: int, connection: int, parent: int) -> None:
    """Forks, and returns only in the child, which becomes the worker.

    The parent process ends the child and its descendants when the child ends, when ``control`` is closed at its other
    end, or when ``parent`` ends; its exit status is the child's. Call it while the process has one thread.

    Args:
        control: a pipe that the starting process holds open while the worker may live.
        connection: descriptor that only the child needs.
        parent: the process that has started this one.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    supervisor = os.getpid()
    worker = os.fork()
    if worker == 0:
        os.close(control)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != supervisor:  # which was killed before the line above
            os._exit(1)
        return
    os.close(connection)
    # The kernel sends it to a group with a stopped process whose parent ends, which is what happens here if the parent
    # is killed: its pipes close before it counts as ended, and by then this process may have stopped the worker.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    status = _wait(worker, control=control, parent=parent)
    statuses = {} if status is None else {worker: status}
    end_all(lambda: _left(supervisor, statuses), within_s=END_PATIENCE_S)
    _leave_with(statuses[worker] if worker in statuses else os.waitpid(worker, 0)[1])


def limit_memory(mib: int) -> None:
    """Limits this process's memory to ``mib`` more than now; allocations beyond it raise MemoryError.

    It counts private writable memory (``RLIMIT_DATA``), not mapped files. Shared memory and child processes are for
    whoever has started it to watch.
    """
    now = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    assert now is not None
    limit = (int(now[1]) << 10) + (mib << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _wait(worker: int, *, control: int, parent: int) -> int | None:
    """The worker's status; None if it must be ended."""
    poll = select.poll()
    poll.register(os.pidfd_open(worker), select.POLLIN)
    poll.register(control, select.POLLIN)
    while os.getppid() == parent:
        ready = {descriptor for descriptor, _ in poll.poll(REAP_EVERY_S * 1000)}
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                return ended[1]
        if control in ready:
            return None
    return None


def _left(supervisor: int, statuses: dict[int, int]) -> list[int]:
    """The living processes below this one; notes the statuses of children that have ended, and ends their groups.

    Without children there are no descendants, since orphans become children at the instant that they become orphans.
    A look at ``/proc`` is not that exact: it misses a process that was made during it by one that ended during it. On a
    busy machine a chain of such processes can flee from any number of looks, but not from a signal to its group.

    Raises:
        ProcessLookupError: the look has missed some.
    """
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            # a session is made by one of those below and left by nobody; in this one's own there may be others
            if os.getsid(ended.si_pid) != os.getsid(0):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(os.getpgid(ended.si_pid), signal.SIGKILL)
            statuses[ended.si_pid] = os.waitpid(ended.si_pid, 0)[1]
        if not (found := descendants(supervisor)):
            raise ProcessLookupError(f"there are processes below {supervisor} that the look at /proc has missed")
        return found
    return []


def _leave_with(status: int) -> None:
    """Ends this process with the worker's status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
