"""Sampled responses as tensors and plain values, for a checkpoint, and back."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from gtpo_megatron.batch import Problem, PromptBatch, RewardBatch, RolloutBatch
from gtpo_megatron.observability.metrics import Max, Mean, Metric, Min, Sum
from gtpo_megatron.orchestration.loop.sampling import Sampled
from gtpo_megatron.orchestration.stages.protocols import RolloutHandle

_METRICS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Sum, Mean, Max, Min)}


def to_plain(sampled: Sampled, rollouts: RolloutBatch) -> dict[str, Any]:
    """Everything, ``rollouts`` in place of the handle to it; ``torch.load`` reads it with ``weights_only=True``."""
    return {
        "problems": [asdict(problem) for problem in sampled.prompts.problems],
        "group_ids": list(sampled.prompts.group_ids),
        "rollouts": asdict(rollouts),
        "rewards": asdict(sampled.rewards),
        "metrics": {name: (type(metric).__name__, asdict(metric)) for name, metric in sampled.metrics.items()},
    }


def from_plain(plain: dict[str, Any], hold: Callable[[RolloutBatch], RolloutHandle]) -> Sampled:
    """The inverse; ``hold`` puts the responses where they are used. Their seconds count where they were spent."""
    metrics: dict[str, Metric] = {name: _METRICS[kind](**fields) for name, (kind, fields) in plain["metrics"].items()}
    problems = tuple(Problem(**fields | {"prompt_ids": tuple(fields["prompt_ids"])}) for fields in plain["problems"])
    return Sampled(
        prompts=PromptBatch(problems=problems, group_ids=tuple(plain["group_ids"])),
        rollouts=hold(RolloutBatch(**plain["rollouts"])),
        rewards=RewardBatch(**plain["rewards"]),
        metrics=metrics,
    )
