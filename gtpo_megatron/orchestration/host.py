"""Checks that this machine can run the engines on its CPUs, before any process starts."""

from pathlib import Path

import psutil
import torch

from gtpo_megatron.config.cluster import ClusterConfig
from gtpo_megatron.config.rollout import RolloutConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.weights.architecture import Architecture

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM 0.32's CPU attention (``CPUAttentionBackend.get_supported_head_sizes``; checked by a test)."""

CPU_EXPERT_MULTIPLE = 32
"""vLLM 0.32's experts on CPUs take a hidden size that this divides (``CPUUnquantizedExperts.output_alignment``)."""

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_GIB = 2**30


def check_host(cluster: ClusterConfig, rollout: RolloutConfig, architecture: Architecture) -> None:
    """Checks memory and attention of engines on this machine's CPUs.

    It checks only if torch is a CPU build and no Ray address is given, so that engines would run here.

    Raises:
        ConfigError: the engines need more memory than the machine has, or vLLM does not support the head size or, for
            experts, the hidden size or expert parallelism.
    """
    if cluster.address or not is_cpu_build():
        return
    check_cache(rollout, where="rollout")
    check_attention(architecture, where="model.path")
    if architecture.experts is not None and architecture.hidden_size % CPU_EXPERT_MULTIPLE:
        raise ConfigError(
            f"model.path: hidden size {architecture.hidden_size}: vLLM's experts on CPUs need a multiple of "
            f"{CPU_EXPERT_MULTIPLE}; take another model, or a machine with GPUs"
        )
    if rollout.expert_parallel:
        raise ConfigError(
            "rollout.expert_parallel=True: vLLM's experts on CPUs do not know which of them a worker holds; switch it "
            "off, or take a machine with GPUs"
        )


def is_cpu_build() -> bool:
    """Whether the installed torch is a build without CUDA."""
    return torch.version.cuda is None


def check_attention(architecture: Architecture, *, where: str) -> None:
    """Raises ConfigError if vLLM's attention on CPUs lacks the head size.

    Args:
        architecture: of the model.
        where: names the model in the message.
    """
    if architecture.head_size not in CPU_HEAD_SIZES:
        raise ConfigError(
            f"{where}: head size {architecture.head_size}: vLLM's attention on CPUs has "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}; take a model with one of these, or a machine with GPUs"
        )


def check_cache(rollout: RolloutConfig, *, where: str) -> None:
    """Raises ConfigError if the key-value caches of all engines are larger than this machine's memory.

    Args:
        rollout: the engines.
        where: prefix of the field in the message.
    """
    num_workers = rollout.num_engines * rollout.tensor_parallel_size
    needed, there = num_workers * rollout.kv_cache_mib << 20, machine_bytes()
    if needed >= there:
        workers = "" if num_workers == 1 else f" x {num_workers} engine processes"
        raise ConfigError(
            f"{where}.kv_cache_mib={rollout.kv_cache_mib}{workers} is {needed / _GIB:.1f} GiB, and this machine has "
            f"{there / _GIB:.1f} GiB; the engines would run on its CPUs, so lower it"
        )


def machine_bytes() -> int:
    """Memory limit of this process: the machine's, or the container's."""
    limits = [int(psutil.virtual_memory().total)]
    for path in _CGROUP_LIMITS:
        try:
            limits.append(int(path.read_text(encoding="ascii")))
        except (OSError, ValueError):  # another version of cgroups, or "max"
            continue
    return min(limits)
