"""What this machine lacks for a run that it is to carry itself, found before any process starts."""

from pathlib import Path

import psutil
import torch

from gtpo_megatron.config.cluster import ClusterConfig
from gtpo_megatron.config.rollout import RolloutConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.weights.architecture import Architecture

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Of vLLM 0.32's attention on CPUs (``CPUAttentionBackend.get_supported_head_sizes``); a test compares them."""

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_GIB = 2**30


def check_host(cluster: ClusterConfig, rollout: RolloutConfig, architecture: Architecture) -> None:
    """Compares a run on this machine's CPUs with what they, and vLLM on them, can do.

    Only where torch is a build for CPUs and no other machine's Ray is named: then this is where engines would run. A
    GPU's memory is the planner's subject.

    Raises:
        ConfigError: engines would take more memory than there is, or vLLM has no attention for the model's heads.
    """
    if cluster.address or not is_cpu_build():
        return
    check_cache(rollout, where="rollout")
    if architecture.head_size not in CPU_HEAD_SIZES:
        raise ConfigError(
            f"model.path: head size {architecture.head_size}: vLLM's attention on CPUs has "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}; take a model with one of these, or a machine with GPUs"
        )


def is_cpu_build() -> bool:
    """Whether the installed torch knows no GPUs, so that whatever starts here runs on CPUs."""
    return torch.version.cuda is None


def check_cache(rollout: RolloutConfig, *, where: str) -> None:
    """Raises ConfigError where the key-value caches of all engines are larger than this machine's memory.

    Args:
        rollout: the engines.
        where: its fields stand, for the message.
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
    """Memory that this process may use at most: the machine's, or what its container is given of it."""
    limits = [int(psutil.virtual_memory().total)]
    for path in _CGROUP_LIMITS:
        try:
            limits.append(int(path.read_text(encoding="ascii")))
        except (OSError, ValueError):  # another version of cgroups, or "max"
            continue
    return min(limits)
