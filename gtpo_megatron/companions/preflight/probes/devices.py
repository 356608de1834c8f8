"""GPUs: which there are, what their driver says, and how fast each works beside all others."""

import shutil
import subprocess
import time
from statistics import median
from typing import Any

import torch

QUERY = ("clocks.sm", "clocks.max.sm", "temperature.gpu", "power.draw", "clocks_throttle_reasons.active")
"""Of nvidia-smi while the device works."""

SMI_TIMEOUT_S = 20.0

CPU_SIZE, GPU_SIZE = 384, 8192
"""Rows and columns of the product: about a millisecond of a core, and of an H100."""

BATCHES = 12
GPU_BATCH, CPU_BATCH = 40, 8
"""Products that are timed together."""

COPIED = 1 << 29

THROTTLED = 0xEC
"""Reasons that slow a device down for want of power or cooling: bits 2, 3, 5, 6, 7 of NVML's clocks event reasons
(software power cap, hardware slowdown, software and hardware thermal slowdown, power brake)."""


def visible(_instance: object = None) -> list[dict[str, Any]]:
    """GPUs that a process sees, in its order. In a child: it makes a context on each."""
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        {"uuid": f"GPU-{str(one.uuid).removeprefix('GPU-')}", "name": one.name, "memory": one.total_memory}
        for one in found
    ]


def matrix_products() -> dict[str, Any]:
    """Times equal matrix products on every visible device, bfloat16 on a GPU, float32 on a CPU.

    Returns:
        ``seconds`` of a product by device (a GPU's median, which a straggler cannot hide; a CPU's best, since other
        programs share it), ``flops`` of one product, ``wrong`` results, ``clocks``: what nvidia-smi says meanwhile, and
        ``copies``: bytes a second to and from the host.
    """
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        times, is_right = _timed(torch.device("cpu"), CPU_SIZE, CPU_BATCH, torch.float32)
        return {
            "seconds": {"cpu": min(times)},
            "flops": 2 * CPU_SIZE**3,
            "wrong": [] if is_right else ["cpu"],
            "clocks": {},
            "copies": {},
        }
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # sums stay exact
    seconds, wrong, clocks, copies = {}, [], {}, {}
    for index, device in enumerate(visible()):
        times, is_right = _timed(torch.device("cuda", index), GPU_SIZE, GPU_BATCH, torch.bfloat16)
        seconds[device["uuid"]] = median(times)
        wrong += [] if is_right else [device["uuid"]]
        clocks[device["uuid"]] = _clocks(device["uuid"], index)
        copies[device["uuid"]] = _copy_rate(torch.device("cuda", index))
    return {"seconds": seconds, "flops": 2 * GPU_SIZE**3, "wrong": wrong, "clocks": clocks, "copies": copies}


def _timed(device: torch.device, size: int, batch: int, dtype: torch.dtype) -> tuple[list[float], bool]:
    """Seconds of a product in each of several batches, and whether a row of the result is right.

    The factors are small integers, so that every sum is exact in float32.
    """
    generator = torch.Generator().manual_seed(1)
    left, right = (
        torch.randint(-2, 3, (size, size), generator=generator).to(device=device, dtype=dtype) for _ in range(2)
    )
    times = []
    for _ in range(BATCHES):
        wait_for(device)
        began = time.perf_counter()
        for _ in range(batch):
            product = left @ right
        wait_for(device)
        times.append((time.perf_counter() - began) / batch)
    expected = (left[:1].double() @ right.double()).to(dtype)
    return times, bool(torch.equal(product[:1], expected))


def _copy_rate(device: torch.device) -> float:
    """Bytes a second from pinned host memory and back, the slower of both."""
    here, there = (
        torch.empty(COPIED, dtype=torch.uint8, pin_memory=True),
        torch.empty(COPIED, dtype=torch.uint8, device=device),
    )
    rates = []
    for target, source in ((there, here), (here, there)):
        target.copy_(source)
        wait_for(device)
        began = time.perf_counter()
        for _ in range(4):
            target.copy_(source, non_blocking=True)
        wait_for(device)
        rates.append(4 * COPIED / (time.perf_counter() - began))
    return min(rates)


def wait_for(device: torch.device) -> None:
    """Returns when the device has done what it was given; a CPU has at once."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _clocks(uuid: str, index: int) -> dict[str, float]:
    """Returns nvidia-smi's figures of a device while it works; empty where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return {}
    square = torch.ones(GPU_SIZE, GPU_SIZE, device=torch.device("cuda", index), dtype=torch.bfloat16)
    for _ in range(10 * GPU_BATCH):  # about half a second, queued
        square @ square
    answer = subprocess.run(
        ["nvidia-smi", "-i", uuid, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=SMI_TIMEOUT_S,
        check=False,
    )
    torch.cuda.synchronize(index)
    return parsed_clocks(answer.stdout)


def parsed_clocks(line: str) -> dict[str, float]:
    """The numbers of a line of nvidia-smi by name; those that the device does not have are omitted."""
    found = {}
    for name, text in zip(QUERY, line.strip().split(", "), strict=False):
        try:
            found[name] = float(int(text, 16) if text.startswith("0x") else float(text))
        except ValueError:  # "[N/A]"
            continue
    return found
