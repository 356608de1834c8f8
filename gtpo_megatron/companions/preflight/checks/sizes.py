"""Checks what depends on the recipe's size: memory by phase, seconds of its lengths, checkpoint, the step's time."""

import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

import torch

from gtpo_megatron.batch import RolloutBatch
from gtpo_megatron.companions.planner.correction import PlanCorrection, write_correction
from gtpo_megatron.companions.preflight.checks.step import Graded, ProbeRollouts, pushed, pushed_bytes
from gtpo_megatron.companions.preflight.checks.surroundings import LONGEST_SAVE_S
from gtpo_megatron.companions.preflight.context import PreflightContext, StepContext
from gtpo_megatron.companions.preflight.expectations import TIME_FACTOR, gib, rate
from gtpo_megatron.companions.preflight.memory_watch import stop_smi
from gtpo_megatron.companions.preflight.probes.batches import random_rollouts, rewards_in_turns
from gtpo_megatron.companions.preflight.result import CheckResult, assessed, bounded, not_here, noted
from gtpo_megatron.companions.preflight.runner import Results
from gtpo_megatron.config.rollout import Transport
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.errors import GTPOError
from gtpo_megatron.observability.metrics import to_scalars
from gtpo_megatron.orchestration.loop.checkpoint_saver import CheckpointSaver
from gtpo_megatron.run_folder.checkpoints import CheckpointFolder, DriverState
from gtpo_megatron.run_folder.manifest import run_facts
from gtpo_megatron.weights.architecture import Architecture

TRANSPORTS: tuple[Transport, ...] = get_args(Transport)

CORRECTION_FILE = "plan_correction.json"

MEMORY_ERROR = 0.05
"""Of a GPU's memory that a phase may take beyond its plan."""

GIB = 1 << 30

MICRO_BATCHES = 2
"""Of each replica and pipeline stage, so that a pipeline is full."""


def lengths(context: StepContext) -> Results:
    """Scores and updates on responses of the recipe's greatest length, full micro-batches on every replica.

    Returns:
        Seconds of a step's ``score`` and ``update``.
    """
    stages, config, gpus = context.stages, context.config, context.gpus
    sampled: ProbeRollouts = context.values["generate"]
    gpus.to_trainer()
    rollouts = full_rollouts(config, context.architecture, version=gpus.version)
    handle = stages.engine.store(rollouts)
    has_scoring_pass = config.rollout.entropy_source == "actor"
    with context.memory.phase("score"):
        score = stages.trainer.score_tokens if has_scoring_pass else stages.trainer.use_sampler_scores
        scored = to_scalars(score(handle))
    right = config.algorithm.success_threshold + 1.0
    stages.trainer.credit_tokens(rewards_in_turns(rollouts.num_responses, right=right))
    with context.memory.phase("train"):
        updated = to_scalars(stages.trainer.update(step=gpus.version + 1))
    gpus.count_update()
    stages.trainer.run_on_all("release", lambda actor: actor.release_batch())
    groups = len(set(rollouts.group_ids.tolist()))
    of_step = times_at_size(scored | updated, config, groups=groups, mean_tokens=sampled.mean_tokens)
    tokens = int((rollouts.prompt_lengths + rollouts.response_lengths).sum())
    shown = f"{rollouts.num_responses} responses of {tokens // rollouts.num_responses} tokens"
    took = {
        "score": f"{scored.get('timing/actor_score_s', 0.0):.2f} s",
        "update": f"{updated['timing/actor_forward_backward_s']:.2f} s and "
        f"{updated['timing/actor_optimizer_s']:.2f} s of the optimizer",
    }
    time_of = context.expected.time
    for part, name, planned in (
        ("score", "scoring", time_of.score if time_of else None),
        ("update", "updates", time_of.train if time_of else None),
    ):
        yield _against_plan(
            f"{name}, {shown}",
            f"{took[part]}, {of_step[part]:.1f} s a step",
            of_step[part],
            planned,
            why=context.expected.why_no_rates,
        )
    return of_step


def times_at_size(
    scalars: Mapping[str, float], config: RunConfig, *, groups: int, mean_tokens: float
) -> dict[str, float]:
    """Seconds of a whole step's scoring and updates from those of a few long responses, by their tokens.

    Attention over the longest sequences is dearer than over the mean's, so these are upper bounds; the bubble of a
    pipeline, which is smaller in a step, makes them so as well.

    Args:
        scalars: timings of the few.
        config: recipe.
        groups: number of groups of the few.
        mean_tokens: mean length of a prompt and its response in a step.
    """
    longest = config.data.max_prompt_tokens + config.rollout.sampling.max_response_tokens
    share = mean_tokens / longest
    prompts = config.data.prompts_per_step
    mini = config.update.mini_batch_prompts or prompts
    scored = sum(scalars.get(f"timing/actor_{name}_s", 0.0) for name in ("score", "reference", "teacher"))
    passes = scalars["timing/actor_forward_backward_s"] * share * mini / min(mini, groups)
    fixed = scalars["timing/actor_optimizer_s"] + scalars.get("timing/actor_prepare_s", 0.0)
    return {"score": scored * share * prompts / groups, "update": passes + fixed}


def _against_plan(what: str, measured: str, seconds: float, planned: float | None, *, why: str) -> CheckResult:
    most = TIME_FACTOR * (planned or 0.0)
    return bounded(
        what,
        measured,
        is_good=seconds <= most,
        expected=f"at most {most:.1f} s a step, {TIME_FACTOR:g} times the plan",
        remedy="compare the checks clocks, kernels and collectives; then another layout (gtpo-megatron plan), larger "
        "--update.micro-batch-tokens, less recomputation",
        unknown=why if planned is None else None,
        figures={"seconds_a_step": seconds} | ({} if planned is None else {"planned_s": planned}),
    )


def sleep(context: StepContext) -> Results:
    """Engines fall asleep and wake up, and the trainer's state goes to the host and comes back.

    Returns:
        Seconds of it; None where nothing is shared.
    """
    what = "sleep and wake"
    if not context.has_gpus:
        yield not_here(what, "no GPU to share")
        return None
    if context.config.rollout.placement != "colocated":
        yield not_here(what, "engines have GPUs of their own (rollout.placement='disaggregated')")
        return None
    gpus = context.gpus
    gpus.to_engine()
    gpus.to_trainer()
    gpus.to_engine()
    moves = {name: gpus.seconds[name] for name in ("to_trainer", "to_push", "to_engine")}
    seconds = sum(moves.values())
    planned = context.expected.time
    yield assessed(
        what,
        ", ".join(f"{name.replace('_', ' ')} {taken:.2f} s" for name, taken in moves.items()),
        is_good=planned is None or seconds <= planned.total / 10,
        expected="works" if planned is None else f"at most {planned.total / 10:.1f} s, a tenth of a step",
        remedy="state travels over the host's links: see copies between GPU and host in the check clocks",
        figures={"seconds": seconds},
    )
    return seconds


def checkpoint(context: StepContext) -> Results:
    """A checkpoint as a run saves it, read back and compared by its checksums, and removed."""
    config = replace(context.config.checkpoint, async_save=False, keep=1, keep_best=0, verify="full")
    folder = CheckpointFolder(context.output / "checkpoint")
    trainer = context.stages.trainer
    context.gpus.to_trainer(keep_weights=True)
    try:
        facts = run_facts(context.config, context.architecture)
        state = DriverState(step=1, sampler={}, counters={}, mismatch={})
        began = time.perf_counter()
        with context.memory.phase("save"), CheckpointSaver(config, folder, facts, trainer) as saver:
            saver.save(state, {})
        save_s = time.perf_counter() - began
        saved = folder.latest("full")
        assert saved is not None
        assert saved.manifest is not None
        num_bytes = saved.manifest.num_bytes
        began = time.perf_counter()
        saver.restore(saved)
        load_s = time.perf_counter() - began
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)
    yield assessed(
        "a checkpoint",
        f"{gib(num_bytes)} saved in {save_s:.1f} s ({rate(num_bytes / save_s)}), restored in {load_s:.1f} s, "
        f"checksums agree",
        is_good=save_s <= LONGEST_SAVE_S,
        expected=f"saved within {LONGEST_SAVE_S:.0f} s",
        remedy="a faster disk (see the check disk), --checkpoint.async-save, or a longer --stop-before-s",
        figures={"bytes": float(num_bytes), "save_s": save_s, "load_s": load_s},
    )


def transports(context: StepContext) -> Results:
    """A verified push over every other transport that this placement allows, then over the recipe's own again."""
    config, gpus = context.config, context.gpus
    sync, open_link = config.weight_sync, context.stages.open_link
    gpus.to_engine()
    num_hosts = len(set(context.processes.hosts.values()))
    for transport in TRANSPORTS:
        if transport == config.transport(has_gpus=context.has_gpus):
            continue
        if why := transport_obstacle(transport, config, has_gpus=context.has_gpus, hosts=num_hosts):
            yield not_here(f"push over {transport}", why)
            continue
        try:
            other = open_link(replace(sync, transport=transport, verify_every_steps=1 << 30))
            times = []
            for _ in range(2):  # the first of a link is compared
                began = time.perf_counter()
                gpus.count_update()
                other.push(version=gpus.version)
                times.append(time.perf_counter() - began)
        except GTPOError as error:
            yield assessed(
                f"push over {transport}",
                str(error),
                is_good=False,
                expected="equal checksums",
                remedy=f"this recipe does not use it; do not choose --weight-sync.transport {transport} here",
            )
            return  # the engines have no usable weights now
        yield pushed(
            transport,
            num_bytes=pushed_bytes(context),
            verified_s=times[0],
            plain_s=times[1],
            expected=context.expected,
        )
    open_link(sync).push(version=gpus.version)


def transport_obstacle(transport: str, config: RunConfig, *, has_gpus: bool, hosts: int) -> str:
    """Why a transport cannot be taken; empty if it can."""
    is_colocated = config.rollout.placement == "colocated"
    if transport == "relay" and not is_colocated:
        return "it is for engines on the ranks' GPUs (rollout.placement='colocated')"
    if transport == "process_group" and is_colocated and has_gpus:
        return "NCCL refuses a rank and an engine on one GPU"
    if transport == "shared_memory" and hosts > 1:
        return f"the run is on {hosts} nodes, which share no memory"
    return ""


def memory(context: StepContext) -> Results:
    """Peaks by phase against the plan; the difference as a file for later plans."""
    if not context.has_gpus:
        found = context.memory.host_gib
        yield noted(
            "memory at the end of each phase, all processes of this machine",
            ", ".join(f"{phase} {gib(size * GIB)}" for phase, size in found.items()),
            why="the plan is for GPUs",
            figures={f"{phase}_bytes": size * GIB for phase, size in found.items()},
        )
        return
    by_host = context.ask(context.one_per_host, stop_smi)
    if missing := [context.processes.hosts[name] for name, peaks in by_host.items() if not peaks]:
        yield not_here("GPU memory by phase", f"no figures of nvidia-smi on {', '.join(missing)}")
        return
    measured = {key: value for of_host in by_host.values() for key, value in of_host.items()}
    planned, peaks = fullest(context, measured)
    boards = [device for devices in context.devices.values() for device in devices]
    for phase in planned:
        yield phase_memory(
            phase,
            planned=planned[phase],
            measured=peaks[phase],
            capacity=min(device.memory for device in boards),
        )
    if planned:
        correction = PlanCorrection(
            recipe=context.config.name,
            layout=str(context.config.parallel),
            gpu=boards[0].name,
            planned_bytes=planned,
            measured_bytes=peaks,
        )
        write_correction(context.output / CORRECTION_FILE, correction)


def fullest(
    context: PreflightContext, measured: Mapping[tuple[str, str], int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Planned and measured bytes by phase, of the GPU that exceeds its plan most in that phase."""
    ranks, engines = context.processes.ranks, context.processes.engines
    per_stage = len(ranks) // context.config.parallel.pipeline_parallel_size
    roles = {name: f"stage {index // per_stage}" for index, name in enumerate(ranks)}
    if context.config.rollout.placement != "colocated":
        roles |= dict.fromkeys(engines, "engine")
    planned: dict[str, int] = {}
    found: dict[str, int] = {}
    for name, role in roles.items():
        for phase, size in context.expected.planned_bytes(role).items():
            for device in context.devices[name]:
                peak = measured.get((phase, device.uuid))
                if peak is not None and (phase not in planned or peak - size > found[phase] - planned[phase]):
                    planned[phase], found[phase] = size, peak
    return planned, found


def phase_memory(phase: str, *, planned: int, measured: int, capacity: int) -> CheckResult:
    """One phase of the fullest GPU."""
    error = measured - planned
    return assessed(
        f"GPU memory while it does: {phase}",
        f"{gib(measured)}, {'+' if error >= 0 else '-'}{gib(abs(error))} against the plan",
        is_good=error <= MEMORY_ERROR * capacity,
        expected=f"at most {gib(planned)} of {gib(capacity)}, by the plan",
        remedy=f"gtpo-megatron plan RECIPE --correction {CORRECTION_FILE} plans with what was measured here, and names "
        f"layouts that fit; another program on the GPU also counts (nvidia-smi)",
        figures={"measured_bytes": float(measured), "planned_bytes": float(planned)},
    )


def step_time(context: StepContext) -> Results:
    """Seconds of a step by what was measured, in the order of a step."""
    values = context.values
    sampled: ProbeRollouts = values["generate"]
    graded: Graded | None = values.get("rewards")
    parts: dict[str, float | None] = {
        "generate": sampled.seconds,
        "reward": graded.seconds if graded else None,
        **values["lengths"],
        "push": values["push"],
        "sleep and wake": values.get("sleep"),
    }
    measured = {name: seconds for name, seconds in parts.items() if seconds is not None}
    planned = context.expected.time
    yield predicted(measured, planned.total if planned else None, why=context.expected.why_no_rates)


def predicted(parts: Mapping[str, float], planned: float | None, *, why: str) -> CheckResult:
    """The sum of a step's parts against the plan; ``why`` there is none."""
    total, most = sum(parts.values()), TIME_FACTOR * (planned or 0.0)
    figures = {"step_s": total} | {f"{name.replace(' ', '_')}_s": seconds for name, seconds in parts.items()}
    return bounded(
        "a step, by these figures",
        f"{total:.1f} s: {', '.join(f'{name} {seconds:.1f}' for name, seconds in parts.items())}",
        is_good=total <= most,
        expected=f"at most {most:.0f} s, {TIME_FACTOR:g} times the plan's {planned or 0.0:.0f}",
        remedy="the part that is furthest from its plan has a line of its own above",
        unknown=why if planned is None else None,
        figures=figures | ({} if planned is None else {"planned_s": planned}),
    )


def full_rollouts(config: RunConfig, architecture: Architecture, *, version: int) -> RolloutBatch:
    """Responses as long as they may be, as many as fill some micro-batches of every replica; whole groups.

    Never more than a step has.
    """
    prompt, response = config.data.max_prompt_tokens, config.rollout.sampling.max_response_tokens
    group, parallel = config.rollout.group_size, config.parallel
    in_micro_batch = max(1, config.update.micro_batch_tokens // (prompt + response))
    wanted = MICRO_BATCHES * parallel.pipeline_parallel_size * in_micro_batch * parallel.data_parallel_size
    rows = min(config.data.prompts_per_step, math.ceil(wanted / group)) * group
    experts = architecture.experts
    routing = None
    if config.rollout.returns_routing and experts is not None:
        tokens = rows * (prompt + response - 1)
        # experts in turns: as balanced as routers can be
        first = torch.arange(tokens)[:, None, None] * experts.experts_per_token
        routing = first + torch.arange(experts.experts_per_token)
        routing = routing.expand(-1, sum(experts.layers), -1) % experts.num_experts
        routing = routing.to(torch.uint8 if experts.num_experts <= 256 else torch.int16).contiguous()
    rollouts = random_rollouts(
        rows,
        prompt_tokens=prompt,
        response_tokens=response,
        vocab_size=architecture.vocab_size,
        group_size=group,
        seed=config.seed,
        policy_version=version,
    )
    return replace(
        rollouts,
        rollout_logprobs=torch.full((rows, response), -math.log(architecture.vocab_size)),
        token_entropy=torch.ones(rows, response) if config.rollout.entropy_source == "rollout" else None,
        routed_experts=routing,
    )
