"""Checks what depends on the recipe's size: memory by phase, seconds of its lengths, checkpoint, the step's time."""

import math
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch

from gtpo_megatron.batch import RewardBatch, RolloutBatch, mask_of_lengths
from gtpo_megatron.companions.planner.correction import PlanCorrection, write_correction
from gtpo_megatron.companions.preflight.checks.step import pushed
from gtpo_megatron.companions.preflight.checks.surroundings import LONGEST_SAVE_S
from gtpo_megatron.companions.preflight.expectations import TIME_FACTOR, Expectations, gib, rate
from gtpo_megatron.companions.preflight.finding import Finding, assessed, not_here, noted
from gtpo_megatron.companions.preflight.memory_watch import stop_smi
from gtpo_megatron.companions.preflight.room import Room
from gtpo_megatron.config.rollout import Transport
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.errors import GTPOError
from gtpo_megatron.observability.metrics import to_scalars
from gtpo_megatron.orchestration.loop.checkpoint_saver import CheckpointSaver
from gtpo_megatron.run_folder.checkpoints import CheckpointFolder, DriverState
from gtpo_megatron.run_folder.manifest import run_facts
from gtpo_megatron.weights.architecture import Architecture, read_architecture

TRANSPORTS: tuple[Transport, ...] = get_args(Transport)

CORRECTION_FILE = "plan_correction.json"

MEMORY_ERROR = 0.05
"""Of a GPU's memory that a phase may take beyond its plan."""

GIB = 1 << 30


def lengths(room: Room) -> Iterator[Finding]:
    """Scores and updates on responses of the recipe's greatest length, full micro-batches on every replica."""
    stages, config = room.running, room.config
    room.turns.trainer()
    rollouts = full_rollouts(config, read_architecture(Path(config.model.path)), version=room.turns.version)
    handle = stages.engine.store(rollouts)
    has_scoring_pass = config.rollout.entropy_source == "actor"
    with room.memory.phase("score"):
        score = stages.trainer.score_tokens if has_scoring_pass else stages.trainer.use_sampler_scores
        scored = to_scalars(score(handle))
    stages.trainer.credit_tokens(mixed_rewards(rollouts, config))
    with room.memory.phase("train"):
        updated = to_scalars(stages.trainer.update(step=room.turns.version + 1))
    room.turns.updated()
    stages.trainer.release_batch()
    groups = len(set(rollouts.group_ids.tolist()))
    of_step = times_at_size(scored | updated, config, groups=groups, mean_tokens=room.mean_prompt + room.mean_response)
    room.seconds |= of_step
    tokens = int((rollouts.prompt_lengths + rollouts.response_lengths).sum())
    shown = f"{rollouts.num_responses} responses of {tokens // rollouts.num_responses} tokens"
    planned = room.expected.time
    yield _against_plan(
        f"scoring, {shown}",
        f"{scored.get('timing/actor_score_s', 0.0):.2f} s, {of_step['score']:.1f} s a step",
        of_step["score"],
        planned.score if planned else None,
        room.expected,
    )
    yield _against_plan(
        f"updates, {shown}",
        f"{updated['timing/actor_forward_backward_s']:.2f} s and {updated['timing/actor_optimizer_s']:.2f} s of the "
        f"optimizer, {of_step['update']:.1f} s a step",
        of_step["update"],
        planned.train if planned else None,
        room.expected,
    )


def times_at_size(
    scalars: Mapping[str, float], config: RunConfig, *, groups: int, mean_tokens: float
) -> dict[str, float]:
    """Seconds of a whole step's scoring and updates from those of a few long responses, by their tokens.

    Attention over the longest sequences is dearer than over the mean's, so these are upper bounds; the bubble of a
    pipeline, which is smaller in a step, makes them so as well.

    Args:
        scalars: timings of the few.
        config: of the recipe.
        groups: that the few were of.
        mean_tokens: of a prompt and its response in a step.
    """
    longest = config.data.max_prompt_tokens + config.rollout.sampling.max_response_tokens
    share = mean_tokens / longest
    prompts = config.data.prompts_per_step
    mini = config.update.mini_batch_prompts or prompts
    scoring = scalars.get("timing/actor_score_s", 0.0) * share * prompts / groups
    reference = scalars.get("timing/actor_reference_s", 0.0) * share * prompts / groups
    passes = scalars["timing/actor_forward_backward_s"] * share * mini / min(mini, groups)
    fixed = scalars["timing/actor_optimizer_s"] + scalars.get("timing/actor_prepare_s", 0.0)
    return {"score": scoring + reference, "update": passes + fixed}


def _against_plan(what: str, measured: str, seconds: float, planned: float | None, expected: Expectations) -> Finding:
    figures = {"seconds_a_step": seconds}
    if planned is None:
        return noted(what, measured, why=expected.why_no_rates, figures=figures)
    return assessed(
        what,
        measured,
        is_good=seconds <= TIME_FACTOR * planned,
        expected=f"at most {TIME_FACTOR * planned:.1f} s a step, {TIME_FACTOR:g} times the plan",
        remedy="compare the checks clocks, kernels and collectives; then another layout (gtpo-megatron plan), larger "
        "--update.micro-batch-tokens, less recomputation",
        figures=figures | {"planned_s": planned},
    )


def sleep(room: Room) -> Iterator[Finding]:
    """Engines fall asleep and wake up, and the trainer's state goes to the host and comes back."""
    what = "sleep and wake"
    if not room.expected.has_gpus:
        yield not_here(what, "no GPU to share")
        return
    if room.config.rollout.placement != "colocated":
        yield not_here(what, "engines have GPUs of their own (rollout.placement='disaggregated')")
        return
    room.turns.engine()
    room.turns.trainer()
    room.turns.engine()
    moves = {name: room.turns.seconds[name] for name in ("to_trainer", "to_push", "to_engine")}
    seconds = sum(moves.values())
    room.seconds["sleep and wake"] = seconds
    planned = room.expected.time
    yield assessed(
        what,
        ", ".join(f"{name.replace('_', ' ')} {taken:.2f} s" for name, taken in moves.items()),
        is_good=planned is None or seconds <= planned.total / 10,
        expected="works" if planned is None else f"at most {planned.total / 10:.1f} s, a tenth of a step",
        remedy="state travels over the host's links: see copies between GPU and host in the check clocks",
        figures={"seconds": seconds},
    )


def checkpoint(room: Room) -> Iterator[Finding]:
    """A checkpoint as a run saves it, read back and compared by its checksums, and removed."""
    config = replace(room.config.checkpoint, async_save=False, keep=1, keep_best=0)
    folder = CheckpointFolder(room.output / "checkpoint")
    trainer = room.running.trainer
    room.turns.trainer(keep_weights=True)
    try:
        facts = run_facts(room.config, read_architecture(Path(room.config.model.path)))
        state = DriverState(step=1, sampler={}, counters={}, mismatch={})
        began = time.perf_counter()
        with room.memory.phase("save"), CheckpointSaver(config, folder, facts, trainer) as saver:
            saver.save(state, {})
        save_s = time.perf_counter() - began
        saved = folder.latest("full")
        assert saved is not None
        assert saved.manifest is not None
        num_bytes = saved.manifest.num_bytes
        began = time.perf_counter()
        trainer.load(saved.path, checksums=saved.manifest.checksums)
        load_s = time.perf_counter() - began
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)
    room.seconds["checkpoint"] = save_s
    yield assessed(
        "a checkpoint",
        f"{gib(num_bytes)} saved in {save_s:.1f} s ({rate(num_bytes / save_s)}), restored in {load_s:.1f} s, "
        f"checksums agree",
        is_good=save_s <= LONGEST_SAVE_S,
        expected=f"saved within {LONGEST_SAVE_S:.0f} s",
        remedy="a faster disk (see the check disk), --checkpoint.async-save, or a longer --stop-before-s",
        figures={"bytes": float(num_bytes), "save_s": save_s, "load_s": load_s},
    )


def transports(room: Room) -> Iterator[Finding]:
    """A verified push over every other transport that this placement allows, then over the recipe's own again."""
    assert room.relink is not None
    sync = room.config.weight_sync
    room.turns.engine()
    for transport in TRANSPORTS:
        if transport == room.transport:
            continue
        if why := transport_obstacle(transport, room.config, has_gpus=room.expected.has_gpus, hosts=_num_hosts(room)):
            yield not_here(f"push over {transport}", why)
            continue
        try:
            other = room.relink(replace(sync, transport=transport, verify_every_steps=1 << 30))
            times = []
            for _ in range(2):  # the first of a link is compared
                began = time.perf_counter()
                room.turns.updated()
                other.push(version=room.turns.version)
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
            num_bytes=room.pushed_bytes,
            verified_s=times[0],
            plain_s=times[1],
            expected=room.expected,
        )
    room.relink(sync).push(version=room.turns.version)


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


def _num_hosts(room: Room) -> int:
    return len(set(room.processes.hosts.values()))


def memory(room: Room) -> Iterator[Finding]:
    """Peaks by phase against the plan; the difference as a file for later plans."""
    if not room.expected.has_gpus:
        found = room.memory.host_gib
        yield noted(
            "memory at the end of each phase, all processes of this machine",
            ", ".join(f"{phase} {gib(size * GIB)}" for phase, size in found.items()),
            why="the plan is for GPUs",
            figures={f"{phase}_bytes": size * GIB for phase, size in found.items()},
        )
        return
    by_host = room.ask(room.one_per_host(), stop_smi)
    if missing := [room.processes.hosts[name] for name, peaks in by_host.items() if not peaks]:
        yield not_here("GPU memory by phase", f"no figures of nvidia-smi on {', '.join(missing)}")
        return
    measured = {key: value for of_host in by_host.values() for key, value in of_host.items()}
    planned, peaks = fullest(room, measured)
    for phase in planned:
        yield phase_memory(phase, planned=planned[phase], measured=peaks[phase], capacity=_capacity(room))
    if planned:
        correction = PlanCorrection(
            recipe=room.config.name,
            layout=str(room.config.parallel),
            gpu=next(device.name for devices in room.devices.values() for device in devices),
            planned_bytes=planned,
            measured_bytes=peaks,
        )
        write_correction(room.output / CORRECTION_FILE, correction)


def fullest(room: Room, measured: Mapping[tuple[str, str], int]) -> tuple[dict[str, int], dict[str, int]]:
    """Planned and measured bytes by phase, of the GPU that exceeds its plan most in that phase."""
    machines, stages = room.processes, room.config.parallel.pipeline_parallel_size
    per_stage = len(machines.ranks) // stages
    roles = {name: f"stage {index // per_stage}" for index, name in enumerate(machines.ranks)}
    if room.config.rollout.placement != "colocated":
        roles |= dict.fromkeys(machines.engines, "engine")
    planned: dict[str, int] = {}
    found: dict[str, int] = {}
    for name, role in roles.items():
        for phase, size in room.expected.planned_bytes(role).items():
            for device in room.devices[name]:
                peak = measured.get((phase, device.uuid))
                if peak is not None and (phase not in planned or peak - size > found[phase] - planned[phase]):
                    planned[phase], found[phase] = size, peak
    return planned, found


def phase_memory(phase: str, *, planned: int, measured: int, capacity: int) -> Finding:
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


def _capacity(room: Room) -> int:
    return min(device.memory for devices in room.devices.values() for device in devices)


def step_time(room: Room) -> Iterator[Finding]:
    """Seconds of a step by what was measured, in the order of a step."""
    order: tuple[str, ...] = ("generate", "reward", "score", "update", "push", "sleep and wake")
    parts = {name: room.seconds[name] for name in order if name in room.seconds}
    yield predicted(parts, room.expected)


def predicted(parts: Mapping[str, float], expected: Expectations) -> Finding:
    """The sum of a step's parts against the plan."""
    total = sum(parts.values())
    measured = f"{total:.1f} s: {', '.join(f'{name} {seconds:.1f}' for name, seconds in parts.items())}"
    figures = {"step_s": total} | {f"{name.replace(' ', '_')}_s": seconds for name, seconds in parts.items()}
    if expected.time is None:
        return noted("a step, by these figures", measured, why=expected.why_no_rates, figures=figures)
    planned = expected.time.total
    return assessed(
        "a step, by these figures",
        measured,
        is_good=total <= TIME_FACTOR * planned,
        expected=f"at most {TIME_FACTOR * planned:.0f} s, {TIME_FACTOR:g} times the plan's {planned:.0f}",
        remedy="the part that is furthest from its plan has a line of its own above",
        figures=figures | {"planned_s": planned},
    )


MICRO_BATCHES = 2
"""Of each replica and pipeline stage, so that a pipeline is full."""


def full_rollouts(config: RunConfig, architecture: Architecture, *, version: int) -> RolloutBatch:
    """Responses as long as they may be, as many as fill some micro-batches of every replica; whole groups.

    Never more than a step has.
    """
    prompt, response = config.data.max_prompt_tokens, config.rollout.sampling.max_response_tokens
    group = config.rollout.group_size
    parallel = config.parallel
    in_micro_batch = max(1, config.update.micro_batch_tokens // (prompt + response))
    wanted = MICRO_BATCHES * parallel.pipeline_parallel_size * in_micro_batch * parallel.data_parallel_size
    groups = min(config.data.prompts_per_step, math.ceil(wanted / group))
    rows = groups * group
    generator = torch.Generator().manual_seed(config.seed)
    lengths = torch.full((rows,), response)
    experts = architecture.experts
    routing = None
    if config.rollout.returns_routing and experts is not None:
        routers = sum(experts.layers)
        tokens = rows * (prompt + response - 1)
        # experts in turns: as balanced as routers can be
        first = torch.arange(tokens)[:, None, None] * experts.experts_per_token
        routing = (first + torch.arange(experts.experts_per_token)).expand(-1, routers, -1) % experts.num_experts
        routing = routing.to(torch.uint8 if experts.num_experts <= 256 else torch.int16).contiguous()
    return RolloutBatch(
        prompt_ids=torch.randint(0, architecture.vocab_size, (rows, prompt), generator=generator),
        prompt_lengths=torch.full((rows,), prompt),
        response_ids=torch.randint(0, architecture.vocab_size, (rows, response), generator=generator),
        response_lengths=lengths,
        loss_mask=mask_of_lengths(lengths, response),
        rollout_logprobs=torch.full((rows, response), -math.log(architecture.vocab_size)),
        group_ids=torch.arange(groups).repeat_interleave(group),
        truncated=torch.zeros(rows, dtype=torch.bool),
        policy_version=version,
        token_entropy=torch.ones(rows, response) if config.rollout.entropy_source == "rollout" else None,
        routed_experts=routing,
    )


def mixed_rewards(rollouts: RolloutBatch, config: RunConfig) -> RewardBatch:
    """Right and wrong responses in turns, so that every group has something to learn."""
    rows = torch.arange(rollouts.num_responses)
    right = config.algorithm.success_threshold + 1.0
    rewards = torch.where(rows % 2 == 0, right, 0.0).float()
    return RewardBatch(
        rewards=rewards,
        failed=torch.zeros(len(rows), dtype=torch.bool),
        turn_rewards=tuple((reward,) for reward in rewards.tolist()),  # each response is one turn
    )
