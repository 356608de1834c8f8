"""Converts sampled responses to tensors and plain values for a checkpoint, and back."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from gtpo_megatron.batch import Problem, PromptBatch, RewardBatch, RolloutBatch
from gtpo_megatron.observability.metrics import Max, Mean, Metric, Min, Sum
from gtpo_megatron.orchestration.loop.sampling import Sampled
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle

_METRICS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Sum, Mean, Max, Min)}


def to_plain(sampled: Sampled, rollouts: RolloutBatch) -> dict[str, Any]:
    """Plain values that ``torch.load`` reads with ``weights_only=True``; ``rollouts`` replaces the handle."""
    return {
        "problems": [problem_to_plain(problem) for problem in sampled.prompts.problems],
        "group_ids": list(sampled.prompts.group_ids),
        "rollouts": asdict(rollouts),
        "rewards": asdict(sampled.rewards),
        "metrics": {name: (type(metric).__name__, asdict(metric)) for name, metric in sampled.metrics.items()},
    }


def from_plain(plain: dict[str, Any], hold: Callable[[RolloutBatch], RolloutHandle]) -> Sampled:
    """The inverse of ``to_plain``; ``hold`` makes the handle of the responses. ``seconds`` is empty."""
    metrics: dict[str, Metric] = {name: _METRICS[kind](**fields) for name, (kind, fields) in plain["metrics"].items()}
    problems = tuple(problem_from_plain(fields) for fields in plain["problems"])
    rollouts = dict(plain["rollouts"])
    if rollouts.get("environment_rewards") is not None:  # checkpoints of an earlier version lack it
        rollouts["environment_rewards"] = RewardBatch(**rollouts["environment_rewards"])
    return Sampled(
        prompts=PromptBatch(problems=problems, group_ids=tuple(plain["group_ids"])),
        rollouts=hold(RolloutBatch(**rollouts)),
        rewards=RewardBatch(**plain["rewards"]),
        metrics=metrics,
    )


def problem_to_plain(problem: Problem) -> dict[str, Any]:
    """Plain values of a problem."""
    return asdict(problem)


def problem_from_plain(plain: dict[str, Any]) -> Problem:
    """The inverse of ``problem_to_plain``."""
    return Problem(**plain | {name: _frozen(plain[name]) for name in ("prompt_ids", "prompt") if name in plain})


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
