"""Checks that this machine can run the engines on its CPUs, and has the memory for a run, before any process starts."""

from collections.abc import Sequence

import torch

from gtpo_megatron.config.cluster import ClusterConfig
from gtpo_megatron.config.rollout import RolloutConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.machine_memory import memory
from gtpo_megatron.orchestration.cpu_memory import CACHES, Taken, said_by_part, what_lowers
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.model_shape import DeltaNet

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM 0.32's CPU attention (``CPUAttentionBackend.get_supported_head_sizes``; checked by a test)."""

CPU_LATENT_SIZE = 576
"""Of a latent and its rotated key, in vLLM 0.32's multi-latent attention on CPUs; checked by the same test."""

CPU_DELTA_SIZES = (64, 128)
"""Elements of a head's key, and of its value, in vLLM 0.32's delta nets on CPUs; checked by a test."""

CPU_EXPERT_MULTIPLE = 32
"""vLLM 0.32's experts on CPUs take a hidden size that this divides (``CPUUnquantizedExperts.output_alignment``)."""

_GIB = 2**30


def check_host(cluster: ClusterConfig, rollout: RolloutConfig, architecture: Architecture) -> None:
    """Checks a run's engines as :func:`check_engines` does; with a Ray address they are elsewhere."""
    check_engines(rollout, architecture, where="rollout", model="model.path", are_here=not cluster.address)


def check_engines(
    rollout: RolloutConfig, architecture: Architecture, *, where: str, model: str, are_here: bool = True
) -> None:
    """Checks that vLLM can split the model over an engine's workers and, if torch is a CPU build, run it on CPUs.

    Args:
        rollout: the engines.
        architecture: of the model.
        where: prefix of the engines' options in messages.
        model: names the model in messages.
        are_here: the engines run on this machine; False checks the split only.

    Raises:
        ConfigError: the model cannot be split so, the engines need more memory than the machine has, or vLLM's CPU
            build lacks the head size, the delta nets or, for experts, the hidden size or expert parallelism.
    """
    architecture.check_sampler(rollout, on_gpus=not is_cpu_build(), where=where)
    if not are_here or not is_cpu_build():
        return
    check_cache(rollout, where=where)
    check_attention(architecture, rollout.dtype, where=model)
    if architecture.experts is not None and architecture.hidden_size % CPU_EXPERT_MULTIPLE:
        raise ConfigError(
            f"{model}: hidden size {architecture.hidden_size}: vLLM's experts on CPUs need a multiple of "
            f"{CPU_EXPERT_MULTIPLE}; take another model, or a machine with GPUs"
        )
    if rollout.expert_parallel:
        raise ConfigError(
            f"{where}.expert_parallel=True: vLLM's experts on CPUs do not know which of them a worker holds; switch it "
            f"off, or take a machine with GPUs"
        )


def is_cpu_build() -> bool:
    """Whether the installed torch is a build without CUDA."""
    return torch.version.cuda is None


def check_attention(architecture: Architecture, dtype: str, *, where: str) -> None:
    """Raises ConfigError if vLLM's attention on CPUs lacks the head size, or its delta nets the model's or the dtype.

    Args:
        architecture: of the model.
        dtype: of the engines.
        where: names the model in the message.
    """
    if architecture.delta is not None:
        _check_delta_nets(architecture.delta, dtype, where=where)
    if architecture.latents is not None:
        if (size := architecture.latents.cached_size) != CPU_LATENT_SIZE:
            raise ConfigError(
                f"{where}: a latent and its rotated key have {size} elements: vLLM's attention on CPUs has "
                f"{CPU_LATENT_SIZE}; take a model with as many, or a machine with GPUs"
            )
    elif architecture.head_size not in CPU_HEAD_SIZES:
        raise ConfigError(
            f"{where}: head size {architecture.head_size}: vLLM's attention on CPUs has "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}; take a model with one of these, or a machine with GPUs"
        )


def _check_delta_nets(delta: DeltaNet, dtype: str, *, where: str) -> None:
    sizes = (delta.key_size, delta.value_size)
    if sizes not in [(size, size) for size in CPU_DELTA_SIZES]:
        raise ConfigError(
            f"{where}: a delta net's keys have {sizes[0]} elements a head, its values {sizes[1]}: vLLM's delta nets on "
            f"CPUs have {' or '.join(map(str, CPU_DELTA_SIZES))} of both; take such a model, or a machine with GPUs"
        )
    if dtype != "bfloat16":
        raise ConfigError(
            f"{where}: vLLM's delta nets on CPUs compute in bfloat16 only, and the engine's dtype is {dtype}; use "
            f"bfloat16, or a machine with GPUs"
        )


def check_cache(rollout: RolloutConfig, *, where: str) -> None:
    """Raises ConfigError if the key-value caches that were asked for are larger than this machine's memory.

    Args:
        rollout: the engines.
        where: prefix of the field in the message.
    """
    if rollout.kv_cache_mib is None:
        return
    num_workers = rollout.num_engines * rollout.tensor_parallel_size
    needed, there = num_workers * rollout.kv_cache_mib << 20, machine_bytes()
    if needed >= there:
        workers = "" if num_workers == 1 else f" x {num_workers} engine processes"
        raise ConfigError(
            f"{where}.kv_cache_mib={rollout.kv_cache_mib}{workers} is {needed / _GIB:.1f} GiB, and this machine has "
            f"{there / _GIB:.1f} GiB; the engines would run on its CPUs, so lower it"
        )


def check_free(rollout: RolloutConfig, needed: Sequence[Taken], *, where: str) -> tuple[str, bool]:
    """Compares what will be taken with the memory that is free now.

    Args:
        rollout: the engines.
        needed: what is taken, such as ``memory_needed`` has it.
        where: prefix of the engines' options.

    Returns:
        A line that says both and what lowers it; and whether enough is free.

    Raises:
        ConfigError: the caches that were asked for are larger than what is free, so that no engine would start.
    """
    total, free = memory()
    machine = f"this machine's {total / _GIB:.1f} GiB of memory"
    cache = sum(one.num_bytes for one in needed if one.by == CACHES)
    if rollout.kv_cache_mib is not None and cache >= free:
        raise ConfigError(
            f"{where}.kv_cache_mib={rollout.kv_cache_mib}: the caches of all engines are {cache / _GIB:.1f} GiB, and "
            f"{free / _GIB:.1f} GiB of {machine} are free; lower it, or leave it out: then it is sized by what is free"
        )
    taken = sum(one.num_bytes for one in needed)
    said = (
        f"takes at least {said_by_part(needed)}; {free / _GIB:.1f} GiB of {machine} are free; a lower "
        f"{what_lowers(needed)} takes less"
    )
    if taken <= free:
        return said, True
    return f"{said}, as does a smaller model: the system may end a process of this or of another run", False


def machine_bytes() -> int:
    """Memory limit of this process: the machine's, or the container's."""
    return memory()[0]
