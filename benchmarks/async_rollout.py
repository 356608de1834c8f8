"""What sampling continuously is worth: simulated at a cluster's size, and predicted against measured on this machine.

``python -m benchmarks.async_rollout --output async_rollout.json`` does both with the run's own scheduler of groups:

- **simulated**: 64 engines with the decode rate of a 7B model on an H100 (the planner's: weights and cache over the
  memory's rate) and heavy-tailed lengths, in every mode;
- **measured** (``--train``): real runs of the tiny model with two engines, both slowed by a sleep at every decode step,
  and a trainer slowed by a sleep. Decode, training and push times are taken from the run in turn; the simulation then
  predicts the step times of all runs from them and from the lengths of the responses.
"""

import dataclasses
import functools
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import tyro
from rich.console import Console

from gtpo_megatron.companions.goodput.simulation import Lengths, Mode, Rates, Result, Simulation
from gtpo_megatron.config.algorithm import OffPolicyConfig
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.orchestration.on_ray import run, start
from gtpo_megatron.orchestration.on_ray.processes import EngineProcess
from gtpo_megatron.orchestration.stages.trainer import Trainer
from gtpo_megatron.run_folder.metrics_file import read_metrics
from gtpo_megatron.run_folder.rollout_log import iter_rollouts, rollout_files
from gtpo_megatron.train import train
from recipes import tiny_cpu

TARGET_SPEEDUP = 1.8
TARGET_ERROR = 0.15

MODES = {
    "in turn": Mode(max_staleness=0, is_stepwise=True),
    "in turn, 1.25 groups for 1": Mode(max_staleness=0, over_sample=1.25, stragglers="abort"),
    "one step ahead": Mode(max_staleness=1, is_stepwise=True),
    "N=1, partial": Mode(max_staleness=1, partial=True),
    "N=4": Mode(max_staleness=4),
    "N=4, partial": Mode(max_staleness=4, partial=True),
    "N=4, partial, 2 groups for 1": Mode(max_staleness=4, partial=True, over_sample=2.0),
}

WARM_STEPS = 3
"""Steps left out at the beginning and the end: nothing is ahead of the first, nothing beside the last."""

RUN_MODES = ("in turn", "N=4, partial", "N=4, partial, 2 groups for 1")
"""Real runs."""

RUN_ENGINES, RUN_GROUPS, RUN_GROUP_SIZE, RUN_CONCURRENT = 2, 8, 8, 8


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line.

    Attributes:
        output: JSON file to write.
        train: also train for real; some minutes on two cores.
        num_engines: simulated.
        groups_per_step: simulated.
        group_size: simulated.
        max_concurrent: sequences that a simulated engine decodes together.
        median_tokens: of a response.
        p99_over_median: of response lengths.
        max_tokens: limit of a response.
        decode_s: decode step of a simulated engine: 15.2 GB of weights at 0.75 of 3.35 TB/s, and launches.
        decode_per_sequence_s: 57 KB of cache for each of 4,000 tokens at that rate.
        train_s: simulated scoring, credit and update.
        push_s: simulated.
        num_steps: simulated.
        engine_sleep_s: real, at every decode step.
        trainer_sleep_s: real, at every update.
        run_steps: real steps.
    """

    output: Path
    train: bool = False
    num_engines: int = 64
    groups_per_step: int = 512
    group_size: int = 16
    max_concurrent: int = 256
    median_tokens: float = 2000.0
    p99_over_median: float = 8.0
    max_tokens: int = 32_768
    decode_s: float = 0.0068
    decode_per_sequence_s: float = 0.00009
    train_s: float = 120.0
    push_s: float = 10.0
    num_steps: int = 16
    engine_sleep_s: float = 0.06
    trainer_sleep_s: float = 4.0
    run_steps: int = 12


def steady(seconds: Sequence[float]) -> float:
    return statistics.mean(seconds[WARM_STEPS:-WARM_STEPS])


def summary(result: Result) -> dict[str, float]:
    return {
        "step_s": steady(result.seconds),
        "mean_staleness": statistics.mean(result.staleness),
        "max_staleness": max(result.staleness),
        "groups_sampled_again": result.num_again,
        "engines_busy": result.busy,
    }


def simulated(options: Options) -> dict[str, Any]:
    """All modes; throughput is trained tokens per second."""
    lengths = Lengths(median=options.median_tokens, p99_over_median=options.p99_over_median, longest=options.max_tokens)
    simulation = Simulation(
        rates=Rates(
            decode_s=options.decode_s,
            decode_per_sequence_s=options.decode_per_sequence_s,
            train_s=options.train_s,
            push_s=options.push_s,
        ),
        lengths=functools.cache(lambda group: lengths.of_group(group, options.group_size, 0)),
        num_engines=options.num_engines,
        max_concurrent=options.max_concurrent,
        groups_per_step=options.groups_per_step,
        group_size=options.group_size,
        num_steps=options.num_steps,
    )
    found = {name: summary(simulation.run(mode)) for name, mode in MODES.items()}
    for row in found.values():
        row["speedup"] = found["in turn"]["step_s"] / row["step_s"]
    return found


# ------------------------------------------------------------------------------------------------------------ real runs
def slow_engine(sleep_s: float) -> type[EngineProcess]:
    """An engine that sleeps at every decode step, and writes down in the run's folder how long the steps took."""

    class SlowEngine(EngineProcess):
        def start(self) -> None:
            super().start()
            engine = self.instance._llm.llm_engine
            step = engine.step
            seconds: list[float] = []
            file = self._run_folder / f"decode_{os.getpid()}.json"

            def slow() -> Any:
                begun = time.perf_counter()
                outputs = step()
                time.sleep(sleep_s)
                seconds.append(time.perf_counter() - begun)
                if len(seconds) % 100 == 0:
                    file.write_text(json.dumps(seconds))
                return outputs

            engine.step = slow

    return SlowEngine


def slow_trainer(sleep_s: float) -> type[Trainer]:
    """A trainer that sleeps at every update."""

    class SlowTrainer(Trainer):
        def update(self, *, step: int) -> Any:
            time.sleep(sleep_s)
            return super().update(step=step)

    return SlowTrainer


def run_config(options: Options, mode: Mode) -> RunConfig:
    config = tiny_cpu.gtpo(num_steps=options.run_steps)
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, prompts_per_step=RUN_GROUPS),
        algorithm=dataclasses.replace(config.algorithm, off_policy=OffPolicyConfig(mode="truncate")),
        rollout=dataclasses.replace(
            config.rollout,
            num_engines=RUN_ENGINES,
            group_size=RUN_GROUP_SIZE,
            max_concurrent_sequences=RUN_CONCURRENT,
            max_staleness=mode.max_staleness,
            partial=mode.partial,
            over_sample=mode.over_sample,
        ),
        evaluation=dataclasses.replace(config.evaluation, every_steps=0, num_problems=2, samples=1),
        weight_sync=dataclasses.replace(config.weight_sync, verify_every_steps=1000),
        checkpoint=dataclasses.replace(config.checkpoint, every_steps=0, export_hf=False),
        logging=dataclasses.replace(config.logging, rollout_groups_per_step=RUN_GROUPS),
    )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of a real run.

    Attributes:
        step_s: mean of its steady steps.
        rates: medians.
        lengths: of responses, by group.
        mean_staleness: of its groups.
    """

    step_s: float
    rates: Rates
    lengths: dict[int, list[int]]
    mean_staleness: float


def measured(options: Options, mode: Mode, folder: Path) -> Measured:
    """Trains with slow engines and a slow trainer."""
    with (
        mock.patch.object(start, "EngineProcess", slow_engine(options.engine_sleep_s)),
        mock.patch.object(run, "Trainer", slow_trainer(options.trainer_sleep_s)),
    ):
        train(run_config(options, mode), run_dir=folder, resume=False, console=Console(stderr=True))
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 0]
    lengths: dict[int, list[int]] = defaultdict(list)
    for _, file in rollout_files(folder):
        for record in iter_rollouts(file):
            lengths[record.group_id].append(len(record.tokens))
    decode = [second for file in folder.glob("decode_*.json") for second in json.loads(file.read_text())]
    staleness = [row.get("rollout/staleness_mean", row["rollout/staleness_count"]) for row in rows]
    return Measured(
        step_s=steady([row["timing/step_s"] for row in rows]),
        rates=Rates(
            decode_s=statistics.mean(decode),
            decode_per_sequence_s=0.0,
            train_s=statistics.median(
                sum(row[f"timing/{stage}_s"] for stage in ("score", "credit", "update")) for row in rows
            ),
            push_s=statistics.median(row["timing/weight_sync_s"] for row in rows),
        ),
        lengths=lengths,
        mean_staleness=statistics.mean(staleness),
    )


def predicted(options: Options, mode: Mode, rates: Rates, lengths: dict[int, list[int]]) -> Result:
    """By the simulation; groups that were never trained are as long as the mean one."""
    mean = round(statistics.mean(length for group in lengths.values() for length in group))
    return Simulation(
        rates=rates,
        lengths=lambda group: lengths.get(group, [mean] * RUN_GROUP_SIZE),
        num_engines=RUN_ENGINES,
        max_concurrent=RUN_CONCURRENT,
        groups_per_step=RUN_GROUPS,
        group_size=RUN_GROUP_SIZE,
        num_steps=options.run_steps,
    ).run(mode)


def compared(options: Options) -> dict[str, Any]:
    """Step times of real runs, and what the simulation says of them from the rates of the run in turn."""
    found: dict[str, Any] = {}
    rates = None
    for name in RUN_MODES:
        with tempfile.TemporaryDirectory() as folder:
            real = measured(options, MODES[name], Path(folder) / "run")
        rates = rates or real.rates
        expected = steady(predicted(options, MODES[name], rates, real.lengths).seconds)
        found[name] = {
            "measured_step_s": real.step_s,
            "predicted_step_s": expected,
            "error": expected / real.step_s - 1,
            "mean_staleness": real.mean_staleness,
            "rates": dataclasses.asdict(real.rates),
        }
    return found


def main() -> None:
    options = tyro.cli(Options)
    results: dict[str, Any] = {
        "options": {name: value for name, value in dataclasses.asdict(options).items() if name != "output"},
        "targets": {"speedup": TARGET_SPEEDUP, "error": TARGET_ERROR},
        "simulated": simulated(options),
    }
    for name, row in results["simulated"].items():
        print(
            f"{name}: {row['step_s']:.0f} s a step, {row['speedup']:.2f} of in turn, mean staleness "
            f"{row['mean_staleness']:.2f}, engines busy {row['engines_busy']:.0%}"
        )
    if options.train:
        results["measured"] = compared(options)
        for name, row in results["measured"].items():
            print(
                f"{name}: {row['measured_step_s']:.2f} s measured, {row['predicted_step_s']:.2f} s predicted "
                f"({row['error']:+.1%}, target {TARGET_ERROR:.0%})"
            )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
