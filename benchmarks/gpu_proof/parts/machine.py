"""The machine: rates of products and copies, which the other parts' figures are shares of; and a C compiler."""

import os
import shutil
import socket
from pathlib import Path

import torch

from benchmarks.gpu_proof.report import Report
from benchmarks.gpu_proof.sizes import Sizes
from gtpo_megatron.companions.planner.hardware import GPUS, gpu_of_device
from gtpo_megatron.companions.preflight.probes.devices import matrix_products

COPIED = 1 << 30


def run(report: Report, sizes: Sizes) -> None:
    with report.section("products and copies") as section:
        found = matrix_products()
        (seconds,) = list(found["seconds"].values())[:1]
        section.figure("rate of a square product", found["flops"] / seconds / 1e12, "TFLOP/s")
        section.require("wrong products", len(found["wrong"]), at_most=0)
        for name, rate in found["copies"].items():
            section.figure(f"to or from pinned host memory, {name[:12]}", rate / 1e9, "GB/s")
        for clocks in found["clocks"].values():
            for name, value in clocks.items():
                section.figure(f"nvidia-smi {name}", value)
    with report.section("what pushes and process groups need of the system") as section:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 10):
            section.figure("the loopback interface", "up")
        section.figure("free in /dev/shm", shutil.disk_usage("/dev/shm").free / 2**30, "GiB")
        section.figure("memory of the host", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, "GiB")
    with report.section("what the data sheet says") as section:
        if sizes.device.type == "cpu":
            section.skip("there is no GPU")
            return
        properties = torch.cuda.get_device_properties(0)
        section.figure("memory", properties.total_memory / 2**30, "GiB")
        gpu = gpu_of_device(properties.name)
        if gpu is not None:
            section.figure("bfloat16, dense", GPUS[gpu].bf16_flops / 1e12, "TFLOP/s")
    with report.section("a C compiler, which Triton needs to launch kernels") as section:
        compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)
        if compiler is None:
            raise RuntimeError("neither gcc, clang nor cc is on the path: set CC, or the Triton kernels cannot run")
        section.figure("compiler", Path(compiler).name)
    with report.section("a copy within the device") as section:
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
