"""One part of the proof, in a process of its own: ``python -m benchmarks.gpu_proof.part NAME --output FILE``."""

import argparse
import importlib
import importlib.metadata
import os
import platform
import sys
import warnings
from pathlib import Path
from typing import Any

from benchmarks.gpu_proof.report import Report

PACKAGES = ("torch", "triton", "megatron-core", "transformers", "transformer-engine", "vllm")


def versions() -> dict[str, str]:
    """Of the packages that the figures depend on; those that are not installed are absent."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def facts(device: str, *, small: bool) -> dict[str, Any]:
    """What the figures depend on."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "is_gpu": device == "cuda", "small": small, "versions": versions()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    import torch

    from benchmarks.gpu_proof.sizes import sizes_of

    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU; --device cpu --small tries the same code without one")
    if arguments.device == "cpu":
        if torch.cuda.is_available():
            raise SystemExit("--device cpu on a machine with a GPU: hide it with CUDA_VISIBLE_DEVICES=")
        torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # Megatron warns of every optional kernel it lacks
    report = Report(arguments.output, facts(arguments.device, small=arguments.small))
    part = importlib.import_module(f"benchmarks.gpu_proof.parts.{arguments.name}")
    part.run(report, sizes_of(torch.device(arguments.device), small=arguments.small))
    sys.stdout.flush()
    # libraries' threads must not keep a part that has said everything from ending
    os._exit(1 if report.has_failed else 0)


if __name__ == "__main__":
    main()
