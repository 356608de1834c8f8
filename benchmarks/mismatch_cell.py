"""One cell of ``benchmarks/mismatch.py``: clean steps of a real trainer and a real vLLM, then planted faults.

    python -m benchmarks.mismatch_cell CELL_JSON MODEL_FOLDER NUM_STEPS RESULT

Writes a line of JSON per step and per fault.
"""

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks.mismatch_faults import KEPT_PREFIXES, ON_PUSH, ON_SAMPLING, STALE, TEMPERATURE, World
from gtpo_megatron.batch import PromptBatch, RewardBatch
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.config.rollout import SamplingConfig, WeightSyncConfig
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.data.prompt_sampler import PromptSampler
from gtpo_megatron.errors import WeightSyncError
from gtpo_megatron.mismatch.gap_report import looks_like
from gtpo_megatron.mismatch.gate import MismatchGate
from gtpo_megatron.mismatch.statistics import PREFIX
from gtpo_megatron.observability.metrics import to_scalars
from gtpo_megatron.observability.timers import StageTimers
from gtpo_megatron.orchestration.in_process import local_stages
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle
from gtpo_megatron.orchestration.stages.stages import Stages
from gtpo_megatron.rollout.weight_engine import check_settings
from recipes import tiny_cpu

GROUP_SIZE, MAX_RESPONSE_TOKENS = 4, 32
VERIFY_EVERY_STEPS = 10
LONG_PROMPT_TOKENS = 180
"""Longer than a block of the prefix cache of vLLM's CPU build, 128 tokens."""
OTHER_TEMPERATURE = 0.8
"""Of the sampler, as a share of the trainer's."""


def config_of(cell: dict[str, Any], model: str) -> RunConfig:
    """The run of a cell: cheap steps with about a thousand tokens."""
    base = tiny_cpu.gtpo(num_steps=100_000)
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, path=model, dtype=cell["trainer"]),
        data=dataclasses.replace(base.data, prompts_per_step=cell["prompts"]),
        parallel=ParallelConfig(num_ranks=1),
        rollout=dataclasses.replace(
            base.rollout,
            group_size=GROUP_SIZE,
            sampling=SamplingConfig(temperature=cell["temperature"], max_response_tokens=MAX_RESPONSE_TOKENS),
            dtype=cell["sampler"],
            head_dtype=cell["head"],
        ),
        weight_sync=WeightSyncConfig(bucket_mib=1, verify_every_steps=VERIFY_EVERY_STEPS),
        cluster=dataclasses.replace(base.cluster, mode="local"),
    )


class Cell:
    """A trainer, an engine and a gate."""

    def __init__(self, config: RunConfig, stages: Stages, sampler: PromptSampler, *, is_random: bool) -> None:
        self.config, self.stages, self.prompts, self.is_random = config, stages, sampler, is_random
        self.gate = MismatchGate.of_run(config, has_experts=False)
        ranks: Any = stages.trainer.ranks
        engines: Any = stages.engine
        self.trainer, self.engine = ranks._actor, engines._engine
        self.worker = self.engine._executor.driver_worker.worker
        self.version, self.num_drawn = 0, 0
        stages.weight_sync.push(version=0)

    def draw(self) -> PromptBatch:
        """The next prompts."""
        num = self.config.data.prompts_per_step
        self.num_drawn += num
        return PromptBatch(
            problems=self.prompts.next(num), group_ids=tuple(range(self.num_drawn, self.num_drawn + num))
        )

    def sample(self, prompts: PromptBatch, sampling: SamplingConfig | None = None) -> RolloutHandle:
        """Responses of the sampler."""
        return self.stages.engine.generate(
            prompts, sampling or self.config.rollout.sampling, samples_per_prompt=GROUP_SIZE, seed=self.num_drawn
        )

    def assessed(self, rollouts: RolloutHandle, *, may_learn: bool) -> dict[str, Any]:
        """What the trainer's scores and the gate say of responses."""
        metrics = self.stages.trainer.score_tokens(rollouts)
        is_verified = self.version % VERIFY_EVERY_STEPS == 0 or not self.gate.has_learnt
        result = self.gate.assess(metrics, is_verified=may_learn and is_verified)
        scalars = to_scalars({n: m for n, m in (metrics | result.metrics).items() if n.startswith(PREFIX)})
        found = {"num_tokens": int(rollouts.own_lengths.sum()), "broken": list(result.broken), "figures": scalars}
        if result.broken:
            report = self.stages.trainer.explain_gap(result.typical_nats)
            found["looks_like"] = looks_like(report, engines=[0] * len(rollouts.own_lengths))
        return found

    def clean_step(self) -> dict[str, Any]:
        """One step as a run makes it, assessed."""
        prompts = self.draw()
        rollouts = self.sample(prompts)
        found = self.assessed(rollouts, may_learn=True)
        self.stages.trainer.credit_tokens(self.rewards(rollouts, prompts))
        self.version += 1
        self.stages.trainer.update(step=self.version)
        self.stages.weight_sync.push(version=self.version)
        return found

    def rewards(self, rollouts: RolloutHandle, prompts: PromptBatch) -> RewardBatch:
        """Verdicts; coins where the model writes tokens that are no text."""
        if not self.is_random:
            return self.stages.grade(rollouts, prompts)
        coins = torch.rand(len(rollouts.own_lengths), generator=torch.Generator().manual_seed(self.version)) < 0.5
        return RewardBatch(rewards=coins.float(), failed=torch.zeros(len(coins), dtype=torch.bool))

    # ------------------------------------------------------------------------------------------------------ the faults
    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of the trainer's."""
        return {name: tensor.clone() for name, tensor in self.trainer._weights().items()}

    def set_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Replaces the trainer's, which nothing else knows of."""
        with torch.no_grad():
            for name, tensor in self.trainer._weights().items():
                tensor.copy_(weights[name])

    def push(self) -> bool:
        """Pushes; returns whether checksums of both sides agree."""
        self.version += 1
        sent, received = self.stages.weight_sync._transfer(self.version, with_checksums=True)
        return bool(sent == received)

    def settings(self) -> str:
        """What the check of vLLM's settings, which is part of every push, says."""
        try:
            check_settings(self.worker.model_runner.model, self.trainer._arch)
        except WeightSyncError as error:
            return str(error)
        return ""

    def fault(self, name: str, stale: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Plants a fault at a push, looks at the step after it, and takes it away again.

        Only the one with stale keys and values needs prompts longer than those of the clean steps. Its gate learns from
        a clean step with these.
        """
        prompts, gate = self.draw(), self.gate
        if name == KEPT_PREFIXES:
            prompts, self.gate = self.long_prompts(), MismatchGate.of_run(self.config, has_experts=False)
            self.push()
            self.assessed(self.sample(prompts), may_learn=True)
        fresh = self.weights()
        self.set_weights(stale)
        self.push()
        self.sample(prompts)  # keys and values of the prompts, by the old weights
        self.set_weights(fresh)
        world = World(
            worker=self.worker,
            receiver=self.worker.weight_transfer_engine.receiver,
            sender=self.trainer._sender,
            engine=self.engine,
            head_size=self.trainer._arch.head_size,
            stale=stale,
        )
        with ON_PUSH[name](world) if name in ON_PUSH else nullcontext():
            same_checksums = self.push()
        sampling = self.config.rollout.sampling
        if name == TEMPERATURE:
            sampling = dataclasses.replace(sampling, temperature=OTHER_TEMPERATURE * sampling.temperature)
        try:
            settings = ""
            with ON_SAMPLING[name](world) if name in ON_SAMPLING else nullcontext():
                settings = self.settings()
                found = self.assessed(self.sample(prompts, sampling), may_learn=False)
        except RuntimeError as error:  # vLLM cannot sample from NaN
            found = {"broken": [f"the engine: {error}"[:200]], "figures": {}, "looks_like": "NaN"}
        self.push()
        self.gate = gate
        return found | {"checksum": not same_checksums, "settings": settings}

    def long_prompts(self) -> PromptBatch:
        """Prompts of several problems each: longer than a block of the prefix cache."""
        batches = [self.draw() for _ in range(10)]
        problems = [
            dataclasses.replace(
                some[0], prompt_ids=tuple(chain(*(one.prompt_ids for one in some)))[:LONG_PROMPT_TOKENS]
            )
            for some in zip(*(batch.problems for batch in batches), strict=True)
        ]
        return PromptBatch(problems=tuple(problems), group_ids=batches[-1].group_ids)


def run(cell: dict[str, Any], model: str, num_steps: int, faults: Sequence[str], result: Path) -> None:
    """All of a cell."""
    from gtpo_megatron.train import check_inputs

    config = config_of(cell, model)
    inputs = check_inputs(config)
    with tempfile.TemporaryDirectory() as folder, result.open("w", encoding="utf-8") as file:

        def write(**line: Any) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        with local_stages(config, Path(folder), StageTimers()) as stages:
            world = Cell(config, stages, PromptSampler(inputs.train, 0), is_random=cell["is_random"])
            first = before = world.weights()
            for step in range(1, num_steps + 1):
                before = world.weights()
                write(step=step, **world.clean_step())
            for name in faults:
                write(fault=name, updates_missed=1, **world.fault(name, before))
                if name in STALE:
                    write(fault=name, updates_missed=num_steps, **world.fault(name, first))
            write(step=num_steps + 1, **world.clean_step())  # the faults are gone
            write(done=True)
        sys.stdout.flush()


if __name__ == "__main__":
    run(json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]), Path(sys.argv[5]))
    os._exit(0)  # vLLM cannot leave a world that the trainer has left before
