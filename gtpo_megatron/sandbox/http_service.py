"""A SandboxFusion service, or one with its interface: ``POST URL/run_code``, one request per case of standard input.

Cases without standard input become one program: the source, then calls that print what they return after a mark.
"""

import json
import secrets
import time
import urllib.error
import urllib.request
from typing import Any

from gtpo_megatron.errors import DataError, SandboxError
from gtpo_megatron.sandbox.protocol import Case, CaseResult, Job, Outcome
from gtpo_megatron.untrusted.json_text import parse_json
from gtpo_megatron.untrusted.text import printable, shown

ATTEMPTS = 3
FIRST_WAIT_S = 0.5
"""Wait after the first failed attempt; it doubles."""
PATIENCE_S = 15.0
"""Time beyond the service's own limits after which a request has failed."""
MAX_ANSWER_BYTES = 64 << 20

_LANGUAGES = {"python": "python", "cpp": "cpp"}


class HttpSandbox:
    """Runs programs by an HTTP service, which must isolate them.

    Args:
        url: of the service, without ``/run_code``.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/") + "/run_code"

    def run(self, job: Job) -> Outcome:
        """Runs a job, see ``Sandbox``."""
        results: list[CaseResult] = []
        deadline = time.monotonic() + job.limits.total_s
        for case in job.cases:
            if time.monotonic() >= deadline or any(one.status == "timeout" for one in results):
                results.append(CaseResult(status="not run"))
                continue
            mark = secrets.token_hex(16)
            source = job.source if case.stdin is not None else f"{job.source}\n{_driver(case, mark)}"
            answer = self._asked(
                {
                    "code": source,
                    "language": _LANGUAGES[job.language],
                    "stdin": case.stdin or "",
                    "compile_timeout": job.limits.compile_s,
                    "run_timeout": job.limits.case_s,
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


def _driver(case: Case, mark: str) -> str:
    """Code behind the program that does what a case says, and prints the result after a mark."""
    if not case.function:
        return f"{case.code}\nprint({mark!r})"
    return (
        f"import json as _json\n"
        f"_it = globals().get({case.function!r}) or getattr(Solution(), {case.function!r})\n"
        f"_out = _it(*_json.loads({case.arguments!r}))\n"
        f"print({mark!r} + _json.dumps(_out, default=lambda one: sorted(one) if isinstance(one, (set, frozenset)) "
        f"else repr(one)))"
    )


def _result(ran: dict[str, Any], case: Case, mark: str, output_bytes: int) -> CaseResult:
    output, detail = str(ran.get("stdout") or ""), printable(ran.get("stderr") or "")[-500:]
    if ran.get("status") == "TimeLimitExceeded":
        return CaseResult(status="timeout", detail=detail)
    if len(output) > output_bytes:
        return CaseResult(status="output")
    if ran.get("status") != "Finished" or ran.get("return_code"):
        return CaseResult(status="error", output=output, detail=detail or f"left with {shown(ran.get('return_code'))}")
    if case.stdin is not None:
        return CaseResult(status="ok", output=output, detail=detail)
    before, found, returned = output.rpartition(mark)
    if not found:
        return CaseResult(status="error", detail="the program ended before its tests")
    return CaseResult(status="ok", output=returned.strip() if case.function else before)
