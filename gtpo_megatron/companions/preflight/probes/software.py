"""Versions on a node, and how much of the machine a run may have."""

import importlib.metadata
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gtpo_megatron.machine_memory import memory
from gtpo_megatron.run_folder.provenance import commit, versions

PACKAGE = "gtpo-megatron"
SMI_TIMEOUT_S = 20.0
SHARED_MEMORY = Path("/dev/shm")


def software(_held: object) -> dict[str, str]:
    """Versions that every node must have alike."""
    found = {**versions(), "python": platform.python_version(), "commit": commit()}
    if driver := driver_version():
        found["nvidia driver"] = driver
    if torch.version.cuda is not None:
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, nccl))}
    return found


def driver_version() -> str:
    """Driver version of the first GPU; empty where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return ""
    answer = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=SMI_TIMEOUT_S,
        check=False,
    )
    return next(iter(answer.stdout.split()), "")


def machine(_held: object) -> dict[str, Any]:
    """Cores, and bytes of memory and of shared memory that are free."""
    total, free = memory()
    shared = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    return {
        "cores": len(psutil.Process().cpu_affinity())
        if hasattr(psutil.Process, "cpu_affinity")
        else psutil.cpu_count(),
        "memory": total,
        "available": free,
        "shared": shared,
    }


def pins(extra: str) -> dict[str, Requirement]:
    """Distributions that this package with an extra asks for, by name; empty where it is not installed."""
    try:
        lines = importlib.metadata.requires(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    asked = [Requirement(line) for line in lines]
    return {
        canonicalize_name(one.name): one
        for one in asked
        if one.name != PACKAGE and (one.marker is None or one.marker.evaluate({"extra": extra}))
    }
