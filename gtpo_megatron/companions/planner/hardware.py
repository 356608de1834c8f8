"""GPUs, and what a process takes before it holds a tensor. Every constant has a unit and a reason."""

from dataclasses import dataclass
from typing import Literal

MIB = 2**20
GIB = 2**30

GPUName = Literal["h100", "h200", "a100", "b200", "b300", "rtx4090"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GPU:
    """A GPU by its data sheet, dense rates.

    Attributes:
        memory_gib: nominal memory, GiB.
        bf16_flops: operations a second on tensor cores.
        hbm_bytes_per_s: bytes a second of its memory.
        nvlink_bytes_per_s: bytes a second and direction, to the other GPUs of the node.
        network_bytes_per_s: bytes a second and direction, to other nodes.
        has_fp8: whether it has products in FP8.
    """

    memory_gib: float
    bf16_flops: float
    hbm_bytes_per_s: float
    nvlink_bytes_per_s: float
    network_bytes_per_s: float
    has_fp8: bool = True


GPUS: dict[GPUName, GPU] = {
    "h100": GPU(
        memory_gib=80, bf16_flops=989e12, hbm_bytes_per_s=3.35e12, nvlink_bytes_per_s=450e9, network_bytes_per_s=50e9
    ),
    "h200": GPU(
        memory_gib=141, bf16_flops=989e12, hbm_bytes_per_s=4.8e12, nvlink_bytes_per_s=450e9, network_bytes_per_s=50e9
    ),
    "a100": GPU(
        memory_gib=80,
        bf16_flops=312e12,
        hbm_bytes_per_s=2.0e12,
        nvlink_bytes_per_s=300e9,
        network_bytes_per_s=25e9,
        has_fp8=False,
    ),
    "b200": GPU(
        memory_gib=180, bf16_flops=2250e12, hbm_bytes_per_s=8.0e12, nvlink_bytes_per_s=900e9, network_bytes_per_s=50e9
    ),
    "b300": GPU(
        memory_gib=268, bf16_flops=2250e12, hbm_bytes_per_s=8.0e12, nvlink_bytes_per_s=900e9, network_bytes_per_s=100e9
    ),
    # a board by itself: PCIe 4.0 x16 in the place of NVLink, a network of 10 Gbit/s
    "rtx4090": GPU(
        memory_gib=24, bf16_flops=165e12, hbm_bytes_per_s=1.008e12, nvlink_bytes_per_s=32e9, network_bytes_per_s=1.25e9
    ),
}
"""SXM boards with one network adapter per GPU: 400 Gbit/s, A100 200, B300 800."""


def gpu_of_device(name: str) -> GPUName | None:
    """The entry of ``GPUS`` for a device's own name, such as ``NVIDIA H100 80GB HBM3``; None if there is none."""
    words = name.lower().replace("-", " ").split()
    known: dict[str, GPUName] = {name.removeprefix("rtx"): name for name in GPUS}
    return next((gpu for word, gpu in known.items() if word in words), None)


DRIVER_BYTES = GIB // 2
"""An 80 GB board shows 79.6 GiB to programs; the rest is the driver's."""

CONTEXT_BYTES = 3 * GIB // 4
"""A process's CUDA context with the kernels of torch, cuBLAS's workspaces and Transformer Engine's."""

COMMUNICATOR_BYTES = GIB // 4
"""NCCL's buffers for one communicator; those of ranks over several nodes and with NVLink SHARP are the largest."""

ENGINE_GRAPHS_BYTES = GIB
"""CUDA graphs of vLLM's decode steps; they stay while the engine sleeps."""

ENGINE_ASLEEP_BYTES = GIB // 2
"""What a sleeping engine's allocator does not give back, besides context and graphs."""

FRAGMENTATION = 0.05
"""Share of what comes and goes in a step (activations, workspaces, buffers) that the allocator cannot hand out again,
with expandable segments."""

EXCHANGE_BYTES = GIB // 16
"""What a GPU holds of both policies while they change places; ``actor/host_pieces.py`` has the same number."""

HOST_PROCESS_BYTES = 4 * GIB
"""Resident memory of a process that has imported torch, CUDA's libraries and Megatron or vLLM."""
