"""A SandboxFusion service, or one with its interface: ``POST URL/run_code``, one request per case of standard input.

Each becomes one program (``inside/single_program.py``), which prints what became of the case after a mark.
"""

import base64
import contextlib
import json
import secrets
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from typing import Any, cast, get_args

from gtpo_megatron.errors import DataError, SandboxError
from gtpo_megatron.sandbox.inside.testing.reports import Progress
from gtpo_megatron.sandbox.protocol import Case, CaseResult, Job, Outcome, Status
from gtpo_megatron.sandbox.server import MODULES, PACKAGE, START, result_of
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.untrusted.text import printable, shown

ATTEMPTS = 3
FIRST_WAIT_S = 0.5
"""Wait after the first failed attempt; it doubles."""
PREPARING_S = 5.0
"""Time beyond a case's own limit in which a service loads pytest and what runs tests."""
PATIENCE_S = 15.0
"""Time beyond the service's own limits after which a request has failed."""
MAX_ANSWER_BYTES = 64 << 20
DETAIL_CHARACTERS = 500

_LANGUAGES = {"python": "python", "cpp": "cpp"}


class HttpSandbox:
    """Runs programs by an HTTP service, which must isolate them.

    Args:
        url: URL of the service, without ``/run_code``.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/") + "/run_code"

    def run(self, job: Job) -> Outcome:
        """Runs a job, see ``Sandbox``."""
        results: list[CaseResult] = []
        deadline = time.monotonic() + job.limits.total_s
        for case in job.cases:
            if any(one.status in ("timeout", "out of time") for one in results):
                results.append(CaseResult(status="not run"))
                continue
            if time.monotonic() >= deadline:
                results.append(CaseResult(status="out of time"))
                continue
            mark = secrets.token_hex(16)
            source = _wrapped(job, case, mark) if job.language == "python" else job.source
            answer = self._asked(
                {
                    "code": source,
                    "language": _LANGUAGES[job.language],
                    "stdin": case.stdin or "",
                    "compile_timeout": job.limits.compile_s,
                    "run_timeout": job.limits.case_s + (PREPARING_S if case.code else 0.0),
                    "memory_limit_MB": job.limits.memory_mib,
                },
                job.limits.compile_s + job.limits.case_s + PATIENCE_S,
            )
            compiled, ran = answer.get("compile_result"), answer.get("run_result")
            if isinstance(compiled, dict) and (compiled.get("status") != "Finished" or compiled.get("return_code")):
                return Outcome(compile_error=printable(compiled.get("stderr") or "it does not compile"))
            if not isinstance(ran, dict):
                raise SandboxError(f"{self._url} answered {shown(answer)}: {printable(answer.get('message', ''))}")
            results.append(_result(ran, case, mark, job.limits.output_bytes))
        return Outcome(results=tuple(results))

    def close(self) -> None:
        """Does nothing: the service keeps no state."""

    def _asked(self, body: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """The service's answer; tried again if it cannot be reached or is overloaded."""
        reason = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(FIRST_WAIT_S * 2 ** (attempt - 1))
            request = urllib.request.Request(
                self._url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
            )
            try:
                with urllib.request.urlopen(request, timeout=limit_s) as reply:
                    text = reply.read(MAX_ANSWER_BYTES)
            except urllib.error.HTTPError as error:
                reason = f"HTTP status {error.code}"
                if error.code not in (408, 429, 500, 502, 503, 504):
                    break
                continue
            except OSError as error:
                reason = printable(error)
                continue
            try:
                answer = parse_json(text, self._url, half_pairs=True)
            except DataError as error:
                reason = str(error)
                break
            if not isinstance(answer, dict):
                reason = f"it answered {shown(answer)}"
                break
            if answer.get("status") == "SandboxError":
                reason = printable(answer.get("message") or "its sandbox failed")
                continue
            return answer
        raise SandboxError(f"the sandbox service {self._url} gave no result: {reason}")


def _wrapped(job: Job, case: Case, mark: str) -> str:
    """A program of its own that does what a case says, see ``inside/single_program.py``."""
    given = {"source": job.source, "before": job.before, "prelude": job.prelude, "mark": mark, "case": asdict(case)}
    given["modules"] = dict(job.modules)
    return (
        f"{START}\nimport base64, zlib\n"
        f"_texts = json.loads(zlib.decompress(base64.b64decode({_packed_modules()!r})))\n"
        f"start(_texts, '{PACKAGE}.single_program', json.loads({json.dumps(given)!r}))\n"
    )


@cache
def _packed_modules() -> str:
    return base64.b64encode(zlib.compress(json.dumps(MODULES).encode())).decode()


def _result(ran: dict[str, Any], case: Case, mark: str, output_bytes: int) -> CaseResult:
    output, detail = str(ran.get("stdout") or ""), printable(ran.get("stderr") or "")[-500:]
    if ran.get("status") == "TimeLimitExceeded":
        return CaseResult(status="timeout", detail=detail)
    if len(output) > output_bytes:
        return CaseResult(status="output")
    if case.stdin is not None:
        if ran.get("status") != "Finished" or ran.get("return_code"):
            why = detail or f"left with {shown(ran.get('return_code'))}"
            return CaseResult(status="error", output=output, detail=why)
        return CaseResult(status="ok", output=output, detail=detail)
    reports = list(_reports(output, mark))
    if case.code:
        progress = Progress(1)
        with contextlib.suppress(KeyError, TypeError, IndexError):  # a report of another shape is none
            progress.take(reports, "error", detail or "the program ended before its tests")
        [fields] = progress.results()
        return result_of(fields)
    report = reports[-1] if reports else {}
    status = "error" if report.get("status") == "unloaded" else report.get("status")
    if status not in get_args(Status):
        return CaseResult(status="error", detail=detail or "the program ended before its tests")
    return CaseResult(
        status=cast("Status", status),
        output=str(report.get("output", "")),
        detail=printable(report.get("detail", ""))[:DETAIL_CHARACTERS],
    )


def _reports(output: str, mark: str) -> Iterator[dict[str, Any]]:
    """What a program's process has reported, in lines that begin with the mark."""
    for part in output.split(mark)[1:]:
        try:
            report = parse_json(part.partition("\n")[0], "the report of a program", half_pairs=True)
        except DataError:
            continue
        if isinstance(report, dict):
            yield report
