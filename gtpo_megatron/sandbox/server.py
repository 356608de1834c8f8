"""The outer end of a server (``inside/main.py``): starts it, gives it jobs, and replaces it when it fails."""

import base64
import contextlib
import json
import logging
import os
import select
import subprocess
import tempfile
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from gtpo_megatron.errors import DataError, SandboxError
from gtpo_megatron.sandbox import seccomp
from gtpo_megatron.sandbox.inside.folders import remove
from gtpo_megatron.sandbox.protocol import CaseResult, Job, Limits, Outcome, Status, TestResult
from gtpo_megatron.supervision.process_tree import descendants, end_all
from gtpo_megatron.supervision.worker import END_PATIENCE_S
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.untrusted.text import printable, shown

logger = logging.getLogger(__name__)

START_LIMIT_S = 60.0
"""Time for the server to start; generous, because the machine may be busy."""

ANSWER_PATIENCE_S = 15.0
"""Time beyond a job's own limits after which the server is replaced."""

MAX_ANSWER_BYTES = 64 << 20

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Of programs; a pool of threads in each would take longer to start than most programs run."""

NOBODY = 65534
"""User that the sandbox runs as if this process is root, whose processes no limit would count."""

INSIDE = Path(__file__).parent / "inside"

SOURCE = (INSIDE / "main.py").read_text(encoding="utf-8")

FOR_PROGRAMS = (
    "confined", "folders", "nodes", "returned", "prelude", "row_modules", "values", "remotes", "operators",
    "lent", "link", "frozen", "program",
)  # fmt: skip
FOR_TESTS = (
    "plain_tables", "scopes", "written_text", "plain_classes", "plain", "pytest_session", "test_runner", "guarded",
    "together", "apart", "test_reports",
)  # fmt: skip
MODULES = {name: (INSIDE / f"{name}.py").read_text(encoding="utf-8") for name in (*FOR_PROGRAMS, *FOR_TESTS)}
"""What ``main.py`` imports, in that order."""


class ProgramServer:
    """A server process, started with the first job and replaced after a failure.

    Args:
        command: what to start before ``PYTHON -c SOURCE``, such as bubblewrap with its options; given the
            folder of programs.
        python: the interpreter, as the server sees it.
        is_isolated: the server has its own namespaces.
        folder: where programs may write, as the server sees it; "": a temporary one of this process.
        packages: folders from which programs may import, as the server sees them.
        framework: folders with pytest; given, the server is one for tests in Python, and any job may be given to it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        python: str,
        is_isolated: bool,
        folder: str = "",
        packages: Sequence[str] = (),
        framework: Sequence[str] = (),
    ) -> None:
        self._framework = list(framework)
        self._packages = list(packages)
        self._command = command
        self._python = python
        self._is_isolated = is_isolated
        self._folder = folder or tempfile.mkdtemp(prefix="programs-")
        # also at exit, without close()
        self._remove_folder = None if folder else weakref.finalize(self, _remove, self._folder)
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, job: Job) -> Outcome:
        """Runs a job.

        Raises:
            SandboxError: the server does not start or answer, or has no compiler for the language.
        """
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(_as_bytes(job))
            self._process.stdin.flush()
            answer = self._answer(job.limits.total_s + job.limits.compile_s + ANSWER_PATIENCE_S)
        except OSError as error:
            self._end()
            raise SandboxError(f"the sandbox has ended: {printable(error)}") from error
        return _outcome(answer, len(job.cases))

    def close(self) -> None:
        """Ends the server with all below it."""
        self._end()
        if self._remove_folder is not None:
            self._remove_folder()

    def _start(self) -> None:
        self._end()
        settings = {
            "is_isolated": self._is_isolated,
            "folder": self._folder,
            "file_mib": Limits().file_mib,
            "packages": self._packages,
            "framework": self._framework,
            "modules": {name: text for name, text in MODULES.items() if self._framework or name in FOR_PROGRAMS},
            "program_filter": base64.b64encode(seccomp.build_filter(may_fork=False)).decode(),
            "compiler_filter": base64.b64encode(seccomp.build_filter(may_fork=True)).decode(),
        }
        command = [*self._command, self._python, "-I", "-S", "-B", "-c", SOURCE]
        is_root = self._is_isolated and os.geteuid() == 0
        user = NOBODY if is_root else None
        with tempfile.TemporaryFile() as said:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=said,
                    cwd="/",
                    env=ENVIRONMENT,
                    process_group=0,  # Ctrl-C is for the one who has started the run
                    user=user,
                    group=user,
                    extra_groups=() if is_root else None,
                )
            except OSError as error:
                raise SandboxError(f"the sandbox does not start: {printable(error)}") from error
            try:
                assert self._process.stdin is not None
                text = json.dumps(settings).encode()
                self._process.stdin.write(len(text).to_bytes(8, "big") + text)
                self._process.stdin.flush()
                answer = self._answer(START_LIMIT_S)
            except (SandboxError, OSError) as error:
                said.seek(0)
                words = printable(said.read(2000).decode("utf-8", "replace"))
                raise SandboxError(f"the sandbox does not start: {words or error}") from error
        if not isinstance(answer, dict) or answer.get("ready") is not True:
            raise SandboxError(f"the sandbox does not start: it said {shown(answer)}")

    def _answer(self, limit_s: float) -> Any:
        """The next line of the server, parsed; it is replaced if there is none."""
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        parts: list[bytes] = []
        size, deadline = 0, time.monotonic() + limit_s
        while (
            size <= MAX_ANSWER_BYTES and select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]
        ):
            part = os.read(descriptor, 1 << 20)
            if not part:
                break
            parts.append(part)
            size += len(part)
            if part.endswith(b"\n"):
                try:
                    return parse_json(b"".join(parts), "the sandbox's answer", half_pairs=True)
                except DataError as error:
                    self._end()
                    raise SandboxError(str(error)) from error
        self._end()
        raise SandboxError("the sandbox gave no answer and was replaced")

    def _end(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        end_all(lambda: descendants(process.pid), within_s=END_PATIENCE_S)
        process.kill()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        process.wait()


def _remove(folder: str) -> None:
    with contextlib.suppress(OSError):  # a program may have made it somebody else's
        remove(folder)


class ProgramServers:
    """Two servers: one for jobs with tests in Python, which pytest has made large to fork, and one for all others.

    Args:
        command: see :class:`ProgramServer`, likewise the others.
        framework: folders with pytest.
        settings: of both servers.
    """

    def __init__(self, command: Sequence[str], *, framework: Sequence[str], **settings: Any) -> None:
        self._server = ProgramServer(command, **settings)
        self._testing = ProgramServer(command, framework=framework, **settings)

    def run(self, job: Job) -> Outcome:
        """Runs a job, see ``Sandbox``."""
        return (self._testing if any(case.code for case in job.cases) else self._server).run(job)

    def close(self) -> None:
        """Ends both."""
        self._server.close()
        self._testing.close()


def _as_bytes(job: Job) -> bytes:
    """A job for the server: two lengths, the job without the text of its tests, and that text."""
    texts = list(dict.fromkeys(case.code for case in job.cases if case.code))
    places = {text: place for place, text in enumerate(texts)}
    coded = [[places[case.code], case.num_tests > 0, case.own] for case in job.cases if case.code]
    cases: list[dict[str, Any]] = []
    num_coded = 0
    for case in job.cases:
        plain: dict[str, Any] = {"stdin": case.stdin, "function": case.function, "arguments": case.arguments}
        plain |= {"kinds": case.kinds, "is_exact": case.is_exact}
        cases.append(plain | {"is_call": bool(case.function), "place": num_coded})
        num_coded += bool(case.code)
    said: dict[str, Any] = {
        "source": job.source,
        "language": job.language,
        "before": job.before,
        "prelude": job.prelude,
    }
    said["modules"] = dict(job.modules)
    parts = [json.dumps({**said, "cases": cases, **asdict(job.limits)}).encode()]
    parts.append(json.dumps({"texts": texts, "cases": coded}).encode() if coded else b"")
    return b"".join([*(len(part).to_bytes(8, "big") for part in parts), *parts])


def _outcome(answer: Any, num_cases: int) -> Outcome:
    """The server's answer, checked."""
    if not isinstance(answer, dict):
        raise SandboxError(f"the sandbox answered {shown(answer)}; expected an object")
    if "failed" in answer:
        raise SandboxError(printable(answer["failed"]))
    if "compile_error" in answer:
        return Outcome(compile_error=str(answer["compile_error"]))
    results = answer.get("results")
    if not isinstance(results, list) or len(results) != num_cases or not all(isinstance(one, dict) for one in results):
        raise SandboxError(f"the sandbox answered {shown(answer)}; expected {num_cases} results")
    return Outcome(results=tuple(result_of(one) for one in results), apart=printable(answer.get("apart", "")))


def result_of(plain: dict[str, Any]) -> CaseResult:
    """A result of a case as the server, or the process of a service, has it.

    Raises:
        SandboxError: a status is none.
    """
    tests = plain.get("tests") or []
    for one in (plain, *tests):
        if one.get("status") not in get_args(Status):
            raise SandboxError(f"the sandbox answered the status {shown(one.get('status'))}")
    return CaseResult(
        status=plain["status"],
        output=str(plain.get("output", "")),
        detail=printable(plain.get("detail", "")),
        tests=tuple(
            TestResult(name=printable(one["name"]), status=one["status"], detail=printable(one["detail"]))
            for one in tests
        ),
    )
