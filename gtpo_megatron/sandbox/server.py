"""The outer end of a server (``inside/main.py``): starts it, gives it jobs, and replaces it when it fails."""

import abc
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
from dataclasses import asdict, dataclass
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

PACKAGE = "gtpo_megatron.sandbox.inside"


def _modules() -> dict[str, str]:
    """The texts of the modules of ``inside/`` by their dotted names, with the packages above them, which are empty."""
    folder, found = Path(__file__).parent / "inside", dict.fromkeys(("gtpo_megatron", "gtpo_megatron.sandbox"), "")
    for path in sorted(folder.rglob("*.py")):
        name = ".".join((PACKAGE, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__")
        found[name] = path.read_text(encoding="utf-8")
    return found


MODULES = _modules()
START = MODULES[f"{PACKAGE}.text_modules"]
"""What a bare Python is given as its program, behind which a function of it is called."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSetup:
    """What servers are started with.

    Attributes:
        command: program and arguments before ``PYTHON -c TEXT``, such as bubblewrap with its options.
        python: the interpreter, as the server sees it, likewise all folders.
        is_isolated: whether the server has its own namespaces.
        folder: folder in which programs may write; "": a temporary one of this process.
        packages: folders from which programs may import.
        framework: folders with pytest.
    """

    command: Sequence[str] = ()
    python: str
    is_isolated: bool
    folder: str = ""
    packages: Sequence[str]
    framework: Sequence[str]


class LocalSandbox(abc.ABC):
    """Runs programs on this machine, by two servers that are started with their first job.

    One is for jobs with tests in Python, which pytest has made large to fork, and one for all others.
    """

    def __init__(self) -> None:
        self._setup: ServerSetup | None = None
        self._folders = contextlib.ExitStack()
        self._servers: dict[bool, ProgramServer] = {}

    @abc.abstractmethod
    def _prepared(self, folders: contextlib.ExitStack) -> ServerSetup:
        """What its servers are started with.

        Args:
            folders: stack of temporary folders, which are removed when the sandbox is closed.

        Raises:
            SandboxError: something that it needs is not there.
        """

    def prepare(self) -> None:
        """Looks whether all is there that servers need.

        Raises:
            SandboxError: something is not.
        """
        if self._setup is None:
            self._setup = self._prepared(self._folders)

    def run(self, job: Job) -> Outcome:
        """Runs a job, see ``Sandbox``."""
        self.prepare()
        assert self._setup is not None
        has_tests = any(case.code for case in job.cases)
        if has_tests not in self._servers:
            self._servers[has_tests] = ProgramServer(self._setup, has_tests=has_tests)
        return self._servers[has_tests].run(job)

    def close(self) -> None:
        """Ends all of its processes."""
        for server in self._servers.values():
            server.close()
        self._folders.close()


class ProgramServer:
    """A server process, started with the first job and replaced after a failure.

    Args:
        setup: setup of the server.
        has_tests: whether it is one for tests in Python, and loads pytest.
    """

    def __init__(self, setup: ServerSetup, *, has_tests: bool) -> None:
        self._setup, self._has_tests = setup, has_tests
        self._folder = setup.folder or tempfile.mkdtemp(prefix="programs-")
        # also at exit, without close()
        self._remove_folder = None if setup.folder else weakref.finalize(self, _remove, self._folder)
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
        setup = self._setup
        settings = {
            "modules": MODULES,
            "start": f"{PACKAGE}.main",
            "is_isolated": setup.is_isolated,
            "folder": self._folder,
            "file_mib": Limits().file_mib,
            "packages": list(setup.packages),
            "framework": list(setup.framework) if self._has_tests else [],
            "program_filter": base64.b64encode(seccomp.build_filter(may_fork=False)).decode(),
            "compiler_filter": base64.b64encode(seccomp.build_filter(may_fork=True)).decode(),
        }
        command = [*setup.command, setup.python, "-I", "-S", "-B", "-c", f"{START}\nstart_server()\n"]
        is_root = setup.is_isolated and os.geteuid() == 0
        user = NOBODY if is_root else None
        with tempfile.TemporaryFile() as errors:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
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
                errors.seek(0)
                words = printable(errors.read(2000).decode("utf-8", "replace"))
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


def _as_bytes(job: Job) -> bytes:
    """A job for the server: two lengths, the job without the text of its tests, and that text."""
    texts = list(dict.fromkeys(case.code for case in job.cases if case.code))
    cases: list[dict[str, Any]] = []
    tests: list[tuple[int, bool, tuple[str, ...]]] = []
    for case in job.cases:
        fields = {name: getattr(case, name) for name in ("stdin", "function", "arguments", "kinds", "is_exact")}
        cases.append(fields | {"place": len(tests)})
        if case.code:
            tests.append((texts.index(case.code), case.num_tests > 0, case.own))
    program = {"source": job.source, "language": job.language, "before": job.before, "prelude": job.prelude}
    seen = program | {"modules": dict(job.modules), "cases": cases} | asdict(job.limits)
    parts = [json.dumps(seen).encode(), json.dumps({"texts": texts, "cases": tests}).encode() if tests else b""]
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
    reason = printable(answer.get("separate_process", ""))
    return Outcome(results=tuple(result_of(one) for one in results), separate_process=reason)


def result_of(fields: dict[str, Any]) -> CaseResult:
    """A result of a case as the server, or the process of a service, has it.

    Raises:
        SandboxError: a status is none.
    """
    tests = fields.get("tests") or []
    for one in (fields, *tests):
        if one.get("status") not in get_args(Status):
            raise SandboxError(f"the sandbox answered the status {shown(one.get('status'))}")
    return CaseResult(
        status=fields["status"],
        output=str(fields.get("output", "")),
        detail=printable(fields.get("detail", "")),
        tests=tuple(
            TestResult(name=printable(one["name"]), status=one["status"], detail=printable(one["detail"]))
            for one in tests
        ),
    )
