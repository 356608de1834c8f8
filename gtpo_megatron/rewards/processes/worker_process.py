"""The pool's side of one grading process, which is replaced when it dies or exceeds a limit."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from gtpo_megatron.errors import ConfigError, WorkerError
from gtpo_megatron.judge.client import JudgeSetup
from gtpo_megatron.rewards.grade import OUT_OF_MEMORY, Reply
from gtpo_megatron.rewards.processes.budget import BatchBudget
from gtpo_megatron.rewards.processes.process_tree import END_PATIENCE_S, is_stopped, memory_bytes
from gtpo_megatron.rewards.processes.worker import Ready
from gtpo_megatron.rewards.request import RewardRequest

logger = logging.getLogger(__name__)

START_LIMIT_S = 120.0
"""Time for a worker to import the reward function; generous, because a cold file system is slow."""

EXIT_PATIENCE_S = 1.0
"""Time for a process to end after its pipe was closed, before it is killed."""

WATCH_EVERY_S = 0.2
"""Interval of memory readings during a row; a shorter row is not measured."""

ASYNC_PATIENCE_S = 1.0
"""Time in which a function that is async ends its late rows itself, before its process is replaced."""

PRINTED_BYTES = 10_000
"""Limit of a row's output; the rest is dropped."""

_BOOTSTRAP = """\
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
told = json.loads(sys.argv[1])
from gtpo_megatron.rewards.processes.supervisor import supervise
supervise(control=told["control"], connection=told["descriptor"], parent=told["parent"])
from gtpo_megatron.rewards.processes.worker import main
main()
"""
"""Sets the parent's module path in the child, so that it can import the same functions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result of one row.

    Attributes:
        reward: the function's result; 0 without a verdict.
        failure: the reason if there is no verdict, else None.
        is_over_budget: the reason is that the batch's time was used up.
        parts: parts of the reward by name.
        info: what the function said about the response, as a JSON object; "" if nothing.
    """

    reward: float
    failure: str | None = None
    is_over_budget: bool = False
    parts: Mapping[str, float] = field(default_factory=dict)
    info: str = ""

    @classmethod
    def of(cls, reply: Reply) -> "Verdict":
        """The verdict of a function's reply."""
        if reply.kind != "ok":
            return cls(reward=0.0, failure=reply.reason)
        return cls(reward=reply.reward, parts=reply.parts or {}, info=reply.info)


OVER_BUDGET = Verdict(
    reward=0.0,
    failure="no time left: rows of its batch took what grading may take of cluster.stage_deadline_s; lower "
    "reward.timeout_s, or raise reward.num_workers",
    is_over_budget=True,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Functions and limits of a worker.

    Attributes:
        function: as in ``RewardConfig.function``.
        timeout_s: seconds per row, or per call of several rows.
        memory_limit_mib: per row, or per call, beyond the memory after import.
        sandbox: as in ``RewardConfig.sandbox``.
        packages: as in ``RewardConfig.packages``.
        judge: as in ``RewardConfig.judge``.
    """

    function: str
    timeout_s: float
    memory_limit_mib: int
    sandbox: str = "bubblewrap"
    packages: str = ""
    judge: JudgeSetup = field(default_factory=JudgeSetup)


class WorkerProcess:
    """One child process, replaced when it dies or is killed. One thread at a time may use it; any may call ``end``."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()  # held while a process is started or ended
        self._has_ended = False
        self._was_disturbed = False
        self._connection: Connection[Any, Any]
        self._output: _Output
        self._control: int
        self._is_running: bool
        self._is_ready: bool
        self._start_deadline: float
        self._memory_at_start: int
        self._process: subprocess.Popen[bytes]
        self._worker: Ready
        self._start()

    @property
    def supervisor_id(self) -> int:
        """Process id of the worker's supervisor."""
        return self._process.pid

    @property
    def takes_several(self) -> bool:
        """Whether one call may have several rows, of a worker that is ready."""
        return self._worker.takes_several

    def grade(self, requests: Sequence[RewardRequest], *, budget: BatchBudget | None = None) -> list[Verdict]:
        """Grades the rows of one call within its limits.

        A call of one row is tried again once if the process was killed or stopped from outside. If a call of several
        rows fails as a whole, its rows are graded one by one, so that only the row at fault has no verdict.

        Args:
            requests: at least one row.
            budget: the budget of their batch; a row beyond its deadline has no verdict.

        Raises:
            WorkerError: the process does not start, or the pool was closed.
            ConfigError: it cannot import the function.
        """
        verdicts = self._call(requests, budget)
        if len(requests) == 1:
            verdicts = self._call(requests, budget) if self._was_disturbed else verdicts
            assert verdicts is not None
            return verdicts
        if verdicts is not None:
            return verdicts
        return [
            self.grade([request], budget=budget)[0]
            if budget is None or time.monotonic() < budget.deadline
            else OVER_BUDGET
            for request in requests
        ]

    def _call(self, requests: Sequence[RewardRequest], budget: BatchBudget | None) -> list[Verdict] | None:
        """One call; None if it failed as a whole, for a reason that may be a single row's."""
        self._was_disturbed = False
        num, is_alone = len(requests), len(requests) == 1
        batch_deadline = None if budget is None else budget.deadline
        if not self.wait_until_ready(batch_deadline):
            return [OVER_BUDGET] * num
        self._output.begin_row()
        try:
            self._connection.send(requests)
        except OSError:  # it died while idle, not because of these rows
            self._replace()
            if not self.wait_until_ready(batch_deadline):
                return [OVER_BUDGET] * num
            self._connection.send(requests)
        deadline = time.monotonic() + self._limits.timeout_s + (ASYNC_PATIENCE_S if self._worker.is_async else 0.0)
        share = deadline if budget is None else max(budget.row_deadline() for _ in requests)
        try:
            replies = self._receive(min(deadline, share), watch_memory=True)
        except (EOFError, OSError):
            status = self._replace(patience_s=EXIT_PATIENCE_S)
            self._was_disturbed = status == -signal.SIGKILL
            failed = Verdict(reward=0.0, failure=f"ended the worker process with status {status}")
            return [failed] if is_alone else None
        if replies is None:
            self._was_disturbed = share >= deadline and is_stopped(self._worker.process_id)
            self._replace()
            if share < deadline:
                return [OVER_BUDGET] * num
            return [Verdict(reward=0.0, failure=f"took longer than {self._limits.timeout_s:g} s")] if is_alone else None
        kinds = {reply.kind for reply in replies}
        if "memory" in kinds:  # a new process frees memory that the rows left allocated
            self._replace()
        return None if not is_alone and kinds & {"memory", "call"} else [Verdict.of(reply) for reply in replies]

    def wait_until_ready(self, deadline: float | None = None) -> bool:
        """Waits until the function is imported; False at the deadline.

        Raises:
            WorkerError: the process ended, or took too long.
            ConfigError: it cannot import the function.
        """
        if self._is_ready:
            return True
        reason = f"took longer than {START_LIMIT_S:g} s"
        deadline = self._start_deadline if deadline is None else min(deadline, self._start_deadline)
        try:
            reply = self._receive(deadline)
        except (EOFError, OSError):
            reason = f"ended the process with status {self._exit_status(EXIT_PATIENCE_S)}"
        else:
            if reply is not None:
                kind, content = reply
                if kind == "unusable":
                    raise ConfigError(content)
                self._is_ready, self._worker = True, content
                self._memory_at_start = memory_bytes(self._worker.process_id)
                return True
            if deadline < self._start_deadline:
                return False
        self.end()
        raise WorkerError(
            f"a reward worker did not start: importing {self._limits.function} {reason}; see its output on stderr"
        )

    def end(self) -> None:
        """Ends the process and its descendants, without a replacement."""
        with self._lock:
            self._has_ended = True
            self._kill()

    def _receive(self, deadline: float, *, watch_memory: bool = False) -> Any:
        """The next message; None at the deadline. Forwards printed output meanwhile.

        Raises:
            EOFError: the process has closed its end.
        """
        watched: list[Any] = [self._connection, self._output.descriptor]
        while (left := deadline - time.monotonic()) > 0:
            ready = wait(watched, min(left, WATCH_EVERY_S) if watch_memory else left)
            if self._output.descriptor in ready and not self._output.pass_on():
                watched.remove(self._output.descriptor)
            if self._connection in ready:
                message = self._connection.recv()
                self._output.pass_on()  # output was written before the message
                return message
            if not ready and watch_memory and self._is_too_large():
                return [Reply("memory", reason=OUT_OF_MEMORY)]
        return None

    def _is_too_large(self) -> bool:
        """Whether the worker and its descendants exceed the memory limit, including shared mappings."""
        limit = self._limits.memory_limit_mib << 20
        return limit > 0 and memory_bytes(self._worker.process_id) - self._memory_at_start > limit

    def _start(self) -> None:
        with self._lock:
            if self._has_ended:
                raise WorkerError("the reward pool was closed while it was grading")
            self._connection, theirs = Pipe()
            control, self._control = os.pipe()
            output, printed = os.pipe()
            self._output = _Output(output)
            told = {
                "descriptor": theirs.fileno(),
                "control": control,
                "parent": os.getpid(),
                "function": self._limits.function,
                "timeout_s": self._limits.timeout_s,
                "memory_limit_mib": self._limits.memory_limit_mib,
                "sandbox": self._limits.sandbox,
                "packages": self._limits.packages,
                "judge": asdict(self._limits.judge),
            }
            try:
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, "-c", _BOOTSTRAP),
                        *(json.dumps([str(entry) for entry in sys.path]), json.dumps(told)),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=printed,  # a reward's output must not mix with the caller's
                    stderr=printed,
                    pass_fds=[theirs.fileno(), control],
                    start_new_session=True,  # Ctrl-C is for the parent
                )
            finally:
                theirs.close()
                os.close(control)
                os.close(printed)
            self._is_running, self._is_ready = True, False
            self._start_deadline = time.monotonic() + START_LIMIT_S

    def _replace(self, *, patience_s: float = 0.0) -> int:
        """Replaces the process; returns the exit status of the old one."""
        status = self._exit_status(patience_s)
        self._connection.close()
        self._start()
        return status

    def _exit_status(self, patience_s: float) -> int:
        """The exit status of the process, which is killed if it does not end within ``patience_s``."""
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            logger.debug("reward worker under %d is killed", self._process.pid)
        with self._lock:
            self._kill()
        return self._process.returncode

    def _kill(self) -> None:
        if not self._is_running:
            return  # the process id may have been reused
        self._is_running = False
        os.close(self._control)  # the supervisor ends everything below it, then itself
        try:
            self._process.wait(2 * END_PATIENCE_S)
        except subprocess.TimeoutExpired:
            logger.warning("the supervisor %d of a reward worker does not answer and is killed", self._process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._output.close()


class _Output:
    """Forwards the first bytes that a row prints to our stderr, and drops the rest.

    Args:
        descriptor: the reading end of the worker's pipe; owned by this object.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._left = PRINTED_BYTES
        self._lock = threading.Lock()  # the pool may be closed while a row runs
        self._is_open = True

    def begin_row(self) -> None:
        """Resets the limit; output until now counts to the previous row."""
        self.pass_on()
        self._left = PRINTED_BYTES

    def pass_on(self) -> bool:
        """Reads available output; False at its end."""
        with self._lock:
            return self._is_open and self._pass_on()

    def _pass_on(self) -> bool:
        for _ in range(16):  # at most a megabyte, so that the wait for a verdict continues
            try:
                text = os.read(self.descriptor, 1 << 16)
            except BlockingIOError:
                return True
            if not text:
                return False
            if self._left > 0:
                _write_to_stderr(text[: self._left])
                if len(text) > self._left:
                    _write_to_stderr(f"\n[the reward function printed more than {PRINTED_BYTES} bytes: cut]\n".encode())
            self._left -= len(text)
        return True

    def close(self) -> None:
        """Forwards the last output; a second call does nothing."""
        with self._lock:
            if self._is_open:
                self._pass_on()
                self._is_open = False
                os.close(self.descriptor)


def _write_to_stderr(text: bytes) -> None:
    with contextlib.suppress(OSError):  # a failed write must not lose a verdict
        while text:
            text = text[os.write(2, text) :]
