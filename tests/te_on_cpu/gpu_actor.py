"""The project's actor with the layers, the optimizer and the settings of a GPU, in a process without one."""

import functools
import importlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from gtpo_megatron.actor import cpu_platform
from gtpo_megatron.distributed import vocab_parallel
from tests.te_on_cpu import device, extension

FOLDER = Path(sys.prefix) / "transformer-engine"
"""Where ``tools/test_gpu_stack.sh`` unpacks Transformer Engine: not on the module path, since Megatron takes it for
usable as soon as it is there."""

_DEVICE_LITERALS = (
    "transformer_engine.pytorch.module.base",
    "transformer_engine.pytorch.optimizers.fused_adam",
    "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention",  # sinks
)
"""Modules of Transformer Engine with ``device="cuda"`` written out."""

_RING = "transformer_engine.pytorch.attention.dot_product_attention.context_parallel"


@functools.cache
def install() -> type:
    """Prepares this process, for good.

    Returns:
        ``MegatronActor``.
    """
    device.install()
    extension.import_transformer_engine(FOLDER)
    for name in _DEVICE_LITERALS:
        importlib.import_module(name).torch = cpu_platform.CpuTorch()  # type: ignore[attr-defined]
    ring: Any = importlib.import_module(_RING)
    exchange = ring.flash_attn_p2p_communicate
    ring.flash_attn_p2p_communicate = lambda *args: [_AwaitedOnce(work) for work in exchange(*args)]
    # with Transformer Engine's Adam Megatron's own loading of an optimizer is what a GPU runs, and its own rotation
    with (
        mock.patch.object(cpu_platform, "_fix_distributed_optimizer_loading"),
        mock.patch.object(cpu_platform, "_rotate_by_tiles"),
    ):
        cpu_platform.install()
    vocab_parallel.KEPT_BYTES = 0
    from gtpo_megatron.actor import actor, trained_model

    trained_model.transformer_config = _on_gloo(trained_model.transformer_config)  # type: ignore[attr-defined]
    cpu_platform.is_cpu = lambda: False
    cpu_platform.device = lambda: torch.device("cpu")
    start = dist.init_process_group
    dist.init_process_group = lambda _, **options: start("gloo", **options)  # type: ignore[assignment]
    return actor.MegatronActor


class _AwaitedOnce:
    """Work that is awaited twice in the ring's backward, where gloo would wait for another message the second time."""

    def __init__(self, work: dist.Work) -> None:
        self._work: dist.Work | None = work

    def wait(self) -> None:
        """Returns at once if it was called before."""
        if self._work is not None:
            self._work.wait()
            self._work = None


def _on_gloo(transformer_config: Any) -> Any:
    """Without what gloo cannot do: it reads what it sends after the call, and has no batches of sends."""

    def configured(*args: Any) -> Any:
        config = transformer_config(*args)
        config.deallocate_pipeline_outputs = config.batch_p2p_comm = config.batch_p2p_sync = False
        return config

    return configured
