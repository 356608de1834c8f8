"""Megatron's optimizer and schedule from this project's configuration."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from gtpo_megatron.actor import cpu_platform
from gtpo_megatron.config.optimizer import OptimizerConfig

logger = logging.getLogger(__name__)


def build_optimizer(config: OptimizerConfig, chunks: Sequence[Any], *, dtype: torch.dtype, distributed: bool) -> Any:
    """Megatron's Adam over a rank's data-parallel model chunks; float32 master weights for trained bfloat16 ones.

    Args:
        config: configuration of the optimizer.
        chunks: chunks of the rank.
        dtype: dtype of the trained weights.
        distributed: shards it over data-parallel ranks.

    Collectives: group creation only.
    """
    made = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.learning_rate,
            min_lr=config.min_learning_rate,
            weight_decay=config.weight_decay,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            adam_eps=config.adam_eps,
            clip_grad=config.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
            **_offload(config),
        ),
        list(chunks),
    )
    fuse_on_cpu(made)
    return made


def fuse_on_cpu(optimizer: Any) -> None:
    """Has torch's Adam pass over each weight once, as Transformer Engine's does on a GPU; else it makes seven passes.

    A state that is loaded brings its own groups, and with them what the optimizer had that stored it.
    """
    if not cpu_platform.is_cpu():
        return
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in one.param_groups:
            group["fused"], group["foreach"] = True, False


def _offload(config: OptimizerConfig) -> dict[str, Any]:
    """Megatron's words for an optimizer on the host; it takes the way of its precision-aware optimizer."""
    if config.offload_fraction == 0:
        return {}
    if cpu_platform.is_cpu():
        logger.info("optimizer.offload_fraction=%g changes nothing: there is no GPU", config.offload_fraction)
        return {}
    return {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": config.offload_fraction,
        "overlap_cpu_optimizer_d2h_h2d": True,
        "use_precision_aware_optimizer": True,
    }


def build_schedule(config: OptimizerConfig, optimizer: Any, *, num_updates: int) -> OptimizerParamScheduler:
    """The learning rate over the run's updates; ``step(1)`` before an update sets that update's rate.

    With ``W`` updates of warm-up and ``N`` in all, update ``k`` of the decay is at ``(k - W) / (N + 1 - W)`` of it.
    """
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.learning_rate,
        min_lr=config.min_learning_rate,
        lr_warmup_steps=config.warmup_updates,
        # the decay arrives one update after the last: at a rate of 0 a rollout would teach nothing; and Megatron wants
        # it to be longer than the warm-up
        lr_decay_steps=max(num_updates, config.warmup_updates) + 1,
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=num_updates,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
