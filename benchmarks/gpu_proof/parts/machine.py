"""The machine as a preflight sees it: products, clocks, copies; and a C compiler, a loopback interface, its memory."""

import os
import shutil
import socket
from pathlib import Path

import torch

from benchmarks.gpu_proof.report import Report
from benchmarks.gpu_proof.sizes import Sizes
from gtpo_megatron.companions.planner.hardware import GPUS, gpu_of_device
from gtpo_megatron.companions.preflight.checks.machines import of_devices
from gtpo_megatron.companions.preflight.expectations import NO_GPUS, Expectations
from gtpo_megatron.companions.preflight.probes.devices import matrix_products
from gtpo_megatron.companions.preflight.probes.system import machine

COPIED = 1 << 30


def run(report: Report, sizes: Sizes) -> None:
    with report.section("products, clocks and copies") as section:
        for result in of_devices({"this machine": matrix_products()}, _expected(sizes)):
            section.add(result)
    with report.section("what pushes and process groups need of the system") as section:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 10):
            section.figure("the loopback interface", "up")
        for name, value in machine(None).items():
            is_count = name == "cores"
            section.figure(name, value if is_count else value / 2**30, "" if is_count else "GiB")
        if sizes.device.type == "cuda":
            section.figure("memory of the GPU", torch.cuda.get_device_properties(0).total_memory / 2**30, "GiB")
    with report.section("a C compiler, which Triton needs to launch kernels") as section:
        compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)
        if compiler is None:
            raise RuntimeError("neither gcc, clang nor cc is on the path: set CC, or the Triton kernels cannot run")
        section.figure("compiler", Path(compiler).name)
    with report.section("a copy within the device") as section:
        if sizes.device.type == "cpu":
            section.skip("there is no GPU")
            return
        there = torch.empty(COPIED, dtype=torch.uint8, device=sizes.device)
        here = torch.empty_like(there)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        here.copy_(there)
        begin.record()
        for _ in range(10):
            here.copy_(there)
        end.record()
        torch.cuda.synchronize()
        section.figure("copied, read once and written once", 10 * COPIED / begin.elapsed_time(end) / 1e6, "GB/s")


def _expected(sizes: Sizes) -> Expectations:
    """Rates by the data sheet."""
    if sizes.device.type == "cpu":
        return NO_GPUS
    device = torch.cuda.get_device_name()
    gpu = gpu_of_device(device)
    return Expectations(gpu=GPUS[gpu] if gpu else None, why_no_rates="" if gpu else f"no data sheet of {device!r}")
