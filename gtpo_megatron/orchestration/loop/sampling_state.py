"""Converts sampled responses to tensors and plain values for a checkpoint, and back."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from gtpo_megatron.batch import ENVIRONMENT_SECONDS, ENVIRONMENT_WAIT, Problem, PromptBatch, RewardBatch, RolloutBatch
from gtpo_megatron.branches import Branch
from gtpo_megatron.observability.metrics import Max, Mean, Metric, Min, Sum, is_deterministic
from gtpo_megatron.orchestration.loop.sampling import SampledStep
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle

_METRICS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Sum, Mean, Max, Min)}


def to_plain(sampled: SampledStep, rollouts: RolloutBatch) -> dict[str, Any]:
    """Plain values that ``torch.load`` reads with ``weights_only=True``; ``rollouts`` replaces the handle.

    Times are left out, so that two runs of one seed write the same.
    """
    rewards = asdict(sampled.rewards)
    for time in (ENVIRONMENT_SECONDS, ENVIRONMENT_WAIT):
        rewards["parts"].pop(time, None)
    return {
        "problems": [problem_to_plain(problem) for problem in sampled.prompts.problems],
        "group_ids": list(sampled.prompts.group_ids),
        "rollouts": asdict(rollouts) | {"branches": [[tuple(one) for one in row] for row in rollouts.branches]},
        "rewards": rewards,
        "metrics": {
            name: (type(metric).__name__, asdict(metric))
            for name, metric in sampled.metrics.items()
            if is_deterministic(name)
        },
    }


def from_plain(plain: dict[str, Any], hold: Callable[[RolloutBatch], RolloutHandle]) -> SampledStep:
    """The inverse of ``to_plain``; ``hold`` makes the handle of the responses. ``seconds`` is empty."""
    metrics: dict[str, Metric] = {name: _METRICS[kind](**fields) for name, (kind, fields) in plain["metrics"].items()}
    problems = tuple(problem_from_plain(fields) for fields in plain["problems"])
    return SampledStep(
        prompts=PromptBatch(problems=problems, group_ids=tuple(plain["group_ids"])),
        rollouts=hold(RolloutBatch(**plain["rollouts"] | {"branches": _branches(plain["rollouts"])})),
        rewards=RewardBatch(**plain["rewards"]),
        metrics=metrics,
    )


def _branches(plain: dict[str, Any]) -> tuple[tuple[Branch, ...], ...]:
    return tuple(tuple(Branch(*one) for one in row) for row in plain.get("branches", ()))


def problem_to_plain(problem: Problem) -> dict[str, Any]:
    """Plain values of a problem."""
    return asdict(problem)


def problem_from_plain(plain: dict[str, Any]) -> Problem:
    """The inverse of ``problem_to_plain``."""
    return Problem(**plain | {name: _frozen(plain[name]) for name in ("prompt_ids", "prompt") if name in plain})


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
