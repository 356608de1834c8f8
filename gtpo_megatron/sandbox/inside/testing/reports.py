"""What the reaper takes from the reports of tests in Python: a case is believed only if its report came whole.

Of each case the process of the tests says how many tests pytest has collected, then what became of each, then that all
were run; or, of a text in which pytest finds none, what became of the text. Runs inside the sandbox; needs the standard
library only.
"""

from collections.abc import Iterable
from typing import Any

DETAIL_BYTES = 2000


class Progress:
    """The cases of one run, over as many processes as their program ends.

    Args:
        num: number of cases.
    """

    def __init__(self, num: int) -> None:
        self.cases: list[dict[str, Any]] = [{"collected": None, "tests": [], "result": None} for _ in range(num)]
        self.is_over = False

    def unfinished(self) -> list[tuple[int, int]]:
        """Numbers of the cases without a result, with how many of their tests were run."""
        return (
            [] if self.is_over else [(at, len(one["tests"])) for at, one in enumerate(self.cases) if not one["result"]]
        )

    def take(self, reports: Iterable[dict[str, Any]], status: str, detail: str) -> None:
        """Takes all that one process has reported.

        Args:
            reports: reports, in order.
            status: end of the process, should it not have reported on all cases.
            detail: likewise.
        """
        for report in reports:
            if "unloaded" in report:
                return self._end("error", str(report["unloaded"]))
            if not self._took(report):
                return self._end("error", "the report of the tests is not whole")
        if waiting := [one for one in self.cases if not one["result"]]:
            self._interrupted(waiting[0], status, detail)
            self.is_over = status in ("timeout", "out of time")
        return None

    def _took(self, report: dict[str, Any]) -> bool:
        """Whether a report is the next one of the first case without a result."""
        case = next((one for one in self.cases if not one["result"]), None)
        if case is None or self.cases[report["case"]] is not case:
            return False
        if "collected" in report:
            is_same = case["collected"] in (None, report["collected"])
            case["collected"] = report["collected"]
            return is_same
        if "test" in report:
            case["tests"].append(_result(report["status"], report["detail"], report["test"]))
            return case["collected"] is not None and len(case["tests"]) <= case["collected"]
        if report["status"] != "done":
            case["result"] = _result(report["status"], report.get("detail", ""))
            return case["collected"] is None
        case["result"] = _result("ok", "")
        return bool(len(case["tests"]) == case["collected"])

    def _interrupted(self, case: dict[str, Any], status: str, detail: str) -> None:
        if case["collected"] is None:
            case["result"] = _result(status, detail)
            return
        case["tests"].append(_result(status, detail))
        if len(case["tests"]) == case["collected"]:
            case["result"] = _result("ok", "")

    def _end(self, status: str, detail: str) -> None:
        for case in self.cases:
            if not case["result"]:
                case["tests"], case["result"] = [], _result(status, detail)

    def results(self) -> list[dict[str, Any]]:
        """The results of all cases."""
        found = []
        for case in self.cases:
            missing = (case["collected"] or 0) - len(case["tests"]) if case["tests"] else 0
            tests = [*case["tests"], *(_result("not run", "") for _ in range(missing))]
            result = case["result"] or _result("ok" if tests else "not run", "")
            found.append(result | {"tests": tests})
        return found


def _result(status: str, detail: str, name: str = "") -> dict[str, Any]:
    return {"status": str(status), "detail": str(detail)[:DETAIL_BYTES], "output": "", "name": str(name)}
