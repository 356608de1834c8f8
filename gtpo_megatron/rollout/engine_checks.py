"""Checks that vLLM has the model, on this machine: its layers, how they are split, its sizes on CPUs, its adapters."""

import importlib.util
from pathlib import Path

import torch

from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.config.checks import divisors
from gtpo_megatron.config.rollout import RolloutConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.machine_memory import memory
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.fp8_layers import LEAST_CAPABILITY, check_fp8
from gtpo_megatron.weights.megatron.checkpoint_files import converted_weights
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


def check_engines(
    rollout: RolloutConfig, architecture: Architecture, *, where: str, model: str, are_here: bool = True
) -> None:
    """Checks that vLLM can split the model over an engine's workers and, if torch is a CPU build, run it on CPUs.

    Args:
        rollout: the engines.
        architecture: architecture of the model.
        where: prefix of the engines' options in messages.
        model: names the model in messages.
        are_here: the engines run on this machine; False checks the split only.

    Raises:
        ConfigError: the model cannot be split so or be in FP8, or its GPUs cannot; the engines need more memory than
            the machine has, or vLLM's CPU build lacks the head size, the delta nets or, for experts, the hidden size,
            expert parallelism or FP8.
    """
    check_split(architecture, rollout, on_gpus=not is_cpu_build(), where=where)
    if rollout.dtype == "fp8":
        check_fp8(architecture, where=where)
    if not are_here:
        return
    if not is_cpu_build():
        _check_gpus(rollout, where=where)
        return
    if rollout.nodes_per_engine > 1 and rollout.ranks_per_node > 1:
        raise ConfigError(
            f"{where}.nodes_per_engine={rollout.nodes_per_engine} with {rollout.ranks_per_node} workers on each: "
            f"vLLM's CPU build takes each worker for a node of its own then; take as many nodes as workers, or GPUs"
        )
    check_cache(rollout, where=where)
    check_attention(architecture, rollout.activation_dtype, where=model)
    if architecture.experts is not None and rollout.dtype == "fp8":
        raise ConfigError(
            f"{where}.dtype='fp8' with experts: vLLM's on CPUs have no scale for each row; use "
            f"{where}.dtype='bfloat16', or a machine with GPUs"
        )
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


def _check_gpus(rollout: RolloutConfig, *, where: str) -> None:
    """Raises ConfigError if this machine's GPUs have no products in FP8, and an engine is to have them."""
    if rollout.dtype != "fp8" or not torch.cuda.is_available():  # a job's first node may have none
        return
    if (found := torch.cuda.get_device_capability()) < LEAST_CAPABILITY:
        raise ConfigError(
            f"{where}.dtype='fp8' on a GPU of compute capability {found[0]}.{found[1]}: products in FP8 need "
            f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or more; use {where}.dtype='bfloat16'"
        )


def check_has_class(architecture: Architecture) -> None:
    """Raises ConfigError if vLLM has no class for the model."""
    if architecture.family == "qwen3_5":
        _check_tower()
    elif architecture.delta is not None and architecture.experts is None:
        raise ConfigError("vLLM has no delta nets without experts: one layer of this model must have some")


def check_split(
    architecture: Architecture, rollout: RolloutConfig, *, on_gpus: bool = False, where: str = "rollout"
) -> None:
    """Raises ConfigError unless experts and delta nets split over an engine's workers, and it returns routing."""
    check_has_class(architecture)
    if rollout.pipeline_parallel_size > architecture.num_layers:
        raise ConfigError(
            f"{where}.pipeline_parallel_size={rollout.pipeline_parallel_size}: the model has "
            f"{architecture.num_layers} layers, and each stage needs one; use fewer stages"
        )
    workers = rollout.tensor_parallel_size
    if architecture.delta is not None and rollout.returns_routing and on_gpus:
        raise ConfigError(
            "rollout.returns_routing=True: vLLM returns routing on GPUs only with a prefix cache, which there is "
            "not beside delta nets; switch it off, and replay with update.routing_replay='score'"
        )
    if architecture.delta is not None and architecture.delta.num_key_heads % workers:
        raise ConfigError(
            f"{where}.tensor_parallel_size={workers} must divide the {architecture.delta.num_key_heads} key heads of "
            f"this model's delta nets; choose from {divisors(architecture.delta.num_key_heads)}"
        )
    if architecture.experts is None:
        if rollout.expert_parallel:
            raise ConfigError(f"{where}.expert_parallel=True: this model is dense; switch it off")
        if rollout.returns_routing:
            raise ConfigError("rollout.returns_routing=True: this model is dense and has no routers; switch it off")
        return
    what, total = (
        ("num_experts", architecture.experts.num_experts)
        if rollout.expert_parallel
        else ("the experts' ffn_size", architecture.experts.ffn_size)
    )
    if total % workers:
        raise ConfigError(
            f"{where}.tensor_parallel_size={workers} must divide {what}={total} of this model; choose from "
            f"{divisors(total)}"
        )


def is_cpu_build() -> bool:
    """Whether the installed torch is a build without CUDA."""
    return torch.version.cuda is None


def check_attention(architecture: Architecture, dtype: str, *, where: str) -> None:
    """Raises ConfigError if vLLM's attention on CPUs lacks the head size, or its delta nets the model's or the dtype.

    Args:
        architecture: architecture of the model.
        dtype: dtype of the engines.
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
    num_workers = rollout.num_engines * rollout.ranks_per_engine
    needed, there = num_workers * rollout.kv_cache_mib << 20, memory()[0]
    if needed >= there:
        workers = "" if num_workers == 1 else f" x {num_workers} engine processes"
        raise ConfigError(
            f"{where}.kv_cache_mib={rollout.kv_cache_mib}{workers} is {needed / _GIB:.1f} GiB, and this machine has "
            f"{there / _GIB:.1f} GiB; the engines would run on its CPUs, so lower it"
        )


def check_adapters(adapter: AdapterConfig, architecture: Architecture, model: Path) -> None:
    """Raises ConfigError unless engines can have such adapters beside the weights of this folder.

    Args:
        adapter: the run's.
        architecture: architecture of the model.
        model: its folder.
    """
    if not adapter.pushes_alone:
        return
    if architecture.experts is not None and is_cpu_build():
        raise ConfigError(
            "adapter.push='adapters' with a mixture of experts: vLLM's CPU build has no experts beside adapters; use "
            "push='merged'"
        )
    if architecture.is_quantized:
        raise ConfigError(
            f"adapter.push='adapters' with model.path={model}: vLLM would read its quantized weights as they are, and "
            f"the trainer reads them as bfloat16; use push='merged'"
        )
    if converted_weights(model) is not None:
        raise ConfigError(
            f"adapter.push='adapters' with model.path={model}: vLLM reads the frozen weights itself, and "
            f"cannot read a converted folder; name the Hugging Face folder, or use push='merged'"
        )


def _check_tower() -> None:
    """Raises ConfigError unless vLLM's file of the model can be imported, which has its tower for images, too."""
    if importlib.util.find_spec("torchvision") is None:
        raise ConfigError(
            "vLLM's Qwen3.5 imports torchvision, which is not installed; install the version of this torch and device"
        )
