"""What sampling one step ahead saves.

``python -m benchmarks.off_policy --output off_policy.json`` runs the real pipeline and the real step with generation
and training replaced by sleeps of equal length, and simulates steps from given or measured stage times: ``--run-dir
RUN`` takes them from a finished run's metrics, ``--generation-s``, ``--training-s`` and ``--push-s`` from you.
"""

import dataclasses
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from gtpo_megatron.batch import Problem, PromptBatch, RewardBatch, RolloutBatch
from gtpo_megatron.config.algorithm import GTPOConfig, OffPolicyConfig
from gtpo_megatron.mismatch.gate import MismatchGate
from gtpo_megatron.mismatch.statistics import gap_metrics
from gtpo_megatron.observability.timers import StageTimers
from gtpo_megatron.orchestration.loop.pipeline import rollout_pipeline
from gtpo_megatron.orchestration.loop.policy_check import MismatchCheck
from gtpo_megatron.orchestration.loop.training_step import training_step
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle
from gtpo_megatron.orchestration.stages.stages import MemorySharing, Stages
from gtpo_megatron.run_folder.metrics_file import read_metrics
from gtpo_megatron.weights.push.sync import WeightSync
from recipes import tiny_cpu

TARGET = 1.15
TRAINING_STAGES = ("score", "credit", "update")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line.

    Attributes:
        output: JSON file to write.
        sleep_s: of generation, and of training.
        num_steps: slept through.
        run_dir: stage times of this run; empty: those below.
        generation_s: of a step.
        training_s: scoring and update of a step.
        push_s: of a step.
        spread: relative standard deviation of the generation time from step to step.
    """

    output: Path
    sleep_s: float = 0.5
    num_steps: int = 12
    run_dir: str = ""
    generation_s: float = 240.0
    training_s: float = 120.0
    push_s: float = 15.0
    spread: float = 0.15


class Sleeper:
    """Engine, reward and trainer; what takes time sleeps."""

    num_restarts = 0

    def __init__(self, seconds: float) -> None:
        self.seconds, self.version = seconds, 0

    def generate(self, prompts: PromptBatch, sampling: Any, *, samples_per_prompt: int, seed: int) -> RolloutHandle:
        del sampling, seed
        time.sleep(self.seconds)
        groups = torch.tensor([group for group in prompts.group_ids for _ in range(samples_per_prompt)])
        ones = torch.ones(len(groups), 1, dtype=torch.int64)
        batch = RolloutBatch(
            prompt_ids=ones,
            prompt_lengths=ones[:, 0],
            response_ids=ones,
            response_lengths=ones[:, 0],
            loss_mask=ones.bool(),
            rollout_logprobs=torch.zeros(len(groups), 1),
            group_ids=groups,
            truncated=torch.zeros(len(groups), dtype=torch.bool),
            policy_version=self.version,
        )
        return RolloutHandle.of(batch)

    def unattended(self) -> "Sleeper":
        return self

    def grade(self, rollouts: RolloutHandle, prompts: PromptBatch) -> RewardBatch:
        del prompts
        num = len(rollouts.group_ids)
        return RewardBatch(rewards=torch.zeros(num), failed=torch.zeros(num, dtype=torch.bool))

    def score_tokens(self, rollouts: RolloutHandle, *, updates: Any = ()) -> dict[str, Any]:
        del rollouts, updates
        return gap_metrics(torch.zeros(1), torch.zeros(1))

    def credit_tokens(self, rewards: RewardBatch) -> dict[str, Any]:
        del rewards
        return {}

    def update(self, *, step: int) -> dict[str, Any]:
        del step
        time.sleep(self.seconds)
        return {}

    def transfer(self, version: int, *, with_checksums: bool) -> tuple[dict[int, Any], dict[int, Any]]:
        del with_checksums
        self.version = version
        return {}, {}


def slept(options: Options, *, max_staleness: int) -> float:
    """Median seconds of a step, the first and the last left out: nothing is ahead of one, nothing beside the other."""
    config = tiny_cpu.gtpo(num_steps=options.num_steps)
    config = dataclasses.replace(
        config,
        algorithm=GTPOConfig(off_policy=OffPolicyConfig(mode="truncate")),
        rollout=dataclasses.replace(config.rollout, max_staleness=max_staleness),
    )
    world: Any = Sleeper(options.sleep_s)
    stages = Stages(
        engine=world,
        grade=world.grade,
        trainer=world,
        weight_sync=WeightSync(config.weight_sync, world.transfer),
        memory_sharing=MemorySharing(None, None, is_colocated=False),
        timers=StageTimers(),
        open_link=lambda _: None,
    )
    problem = Problem(problem_id="0", prompt_ids=(1,), answer="")

    def draw(num: int) -> PromptBatch:
        return PromptBatch(problems=(problem,) * num, group_ids=tuple(range(num)))

    pipeline = rollout_pipeline(draw, stages, config)
    gate = MismatchGate.of_run(config, has_experts=False)
    mismatch = MismatchCheck(gate, world, Path(), world, verify_every_steps=config.weight_sync.verify_every_steps)
    seconds = []
    for step in range(1, options.num_steps + 1):
        start = time.perf_counter()
        training_step(pipeline, stages, config, mismatch, step=step)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:-1])


def simulate(generation: Sequence[float], training: Sequence[float], push: Sequence[float], *, ahead: bool) -> float:
    """Seconds of all steps: one after the other, or each step's responses beside the training of the step before."""
    if not ahead:
        return sum(generation) + sum(training) + sum(push)
    following = [*generation[1:], 0.0]
    return generation[0] + sum(
        max(train, sample) + pushed for train, sample, pushed in zip(training, following, push, strict=True)
    )


def stage_times(options: Options) -> tuple[list[float], list[float], list[float]]:
    """Of a run's steps, or made up around the given means."""
    if options.run_dir:
        rows = [row for row in read_metrics(Path(options.run_dir) / "metrics.jsonl") if "timing/step_s" in row]
        generation = [row["timing/rollout_s"] + row["timing/reward_s"] for row in rows]
        training = [sum(row[f"timing/{stage}_s"] for stage in TRAINING_STAGES) for row in rows]
        return generation, training, [row["timing/weight_sync_s"] for row in rows]
    draws = random.Random(0)
    num = 200
    generation = [
        max(0.0, draws.gauss(options.generation_s, options.spread * options.generation_s)) for _ in range(num)
    ]
    return generation, [options.training_s] * num, [options.push_s] * num


def main() -> None:
    options = tyro.cli(Options)
    in_turn, ahead = (slept(options, max_staleness=bound) for bound in (0, 1))
    times = stage_times(options)
    num = len(times[0])
    simulated = {name: simulate(*times, ahead=name == "ahead") / num for name in ("in_turn", "ahead")}
    results = {
        "slept": {
            "stage_s": options.sleep_s,
            "step_in_turn_s": in_turn,
            "step_ahead_s": ahead,
            "over_longer_stage": ahead / options.sleep_s,
            "target": TARGET,
        },
        "simulated": {
            "stage_times_of": options.run_dir or "the command line",
            "generation_s": statistics.mean(times[0]),
            "training_s": statistics.mean(times[1]),
            "push_s": statistics.mean(times[2]),
            **{f"step_{name}_s": value for name, value in simulated.items()},
            "speedup": simulated["in_turn"] / simulated["ahead"],
        },
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(f"slept: a step ahead takes {ahead / options.sleep_s:.3f} of the longer stage (target at most {TARGET})")
    print(f"simulated: {simulated['in_turn']:.1f} s in turn, {simulated['ahead']:.1f} s ahead")


if __name__ == "__main__":
    main()
