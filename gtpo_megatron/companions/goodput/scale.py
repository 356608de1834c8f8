"""A recipe on so many nodes: seconds of a step's stages, stragglers and staleness, failures."""

import functools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist

from gtpo_megatron.companions.goodput.failures import GPU_HOURS_BETWEEN_FAILURES, Failures, failures_of
from gtpo_megatron.companions.goodput.simulation import P99, Lengths, Mode, Rates, Result, Simulation
from gtpo_megatron.companions.planner.adapters import adapter_parameters
from gtpo_megatron.companions.planner.layout import Layout
from gtpo_megatron.companions.planner.layout_plan import make_plan
from gtpo_megatron.companions.planner.phases import engine_of
from gtpo_megatron.companions.planner.request import Batch, PlanRequest, with_engines_apart
from gtpo_megatron.companions.planner.search import AssessedLayout
from gtpo_megatron.companions.planner.step_time import BYTES_EFFICIENCY, HOST_BYTES, StepTime, decode_rates
from gtpo_megatron.companions.planner.trainer_state import StageParameters, stage_parameters
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.weights.adapter_shapes import num_parameters

TAIL = 8.0
"""99th percentile of response lengths over their median, before the limit: as in docs/rollouts.md; assumed."""

IN_TURN = Mode(max_staleness=0, is_stepwise=True)
AHEAD = Mode(max_staleness=4, partial=True, over_sample=2.0)
"""What docs/rollouts.md recommends for engines on GPUs of their own."""

ROLLOUT_SHARES = (0.25, 0.375, 0.5, 0.625, 0.75)
"""Of the nodes, that generate; the best one is taken."""

NUM_STEPS, WARM_STEPS = 14, 4
"""Simulated steps, and those left out at the beginning and the end: nothing is ahead of the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleRow:
    """A way to run the recipe's batch on so many GPUs.

    Attributes:
        num_gpus: number of all GPUs.
        num_rollout_gpus: GPUs that only generate; 0: colocated.
        mode: how responses are sampled.
        assessed: the trainer's layout.
        generate_s: time until a step's last response, by the simulation; beside training if they do not take turns.
        step_s: time from push to push, by the simulation.
        tokens: prompts and responses of a step.
        engines_idle: share of the time in which an engine has no sequence: of generation if engines and trainer take
            turns, else of the step.
        stragglers_s: seconds of generation that engines would not need if they were full until its end; if engines and
            trainer do not take turns, the trainer's wait for a step's groups.
        mean_staleness: pushes between the weights that sampled a group and those that train it.
        failures: rate and cost of the run's failures.
        save_steps: steps between saves for the most goodput.
        goodput: share of the time that is training which is not done again.
        recipe_save_steps: steps between saves in the recipe; 0: at the end only.
        recipe_goodput: goodput with the recipe's saves; 0 if nothing is saved on the way.
    """

    num_gpus: int
    num_rollout_gpus: int
    mode: Mode
    assessed: AssessedLayout
    generate_s: float
    step_s: float
    tokens: float
    engines_idle: float
    stragglers_s: float
    mean_staleness: float
    failures: Failures
    save_steps: int
    goodput: float
    recipe_save_steps: int
    recipe_goodput: float

    @property
    def time(self) -> StepTime:
        """The planner's seconds, without stragglers."""
        return self.assessed.time

    @property
    def tokens_per_second_and_gpu(self) -> float:
        """While nothing fails."""
        return self.tokens / self.step_s / self.num_gpus


def scale_rows(
    config: RunConfig,
    request_of: Callable[[RunConfig, int, int], PlanRequest],
    *,
    num_nodes: int,
    gpus_per_node: int = 8,
    tail: float = TAIL,
    gpu_hours_between_failures: float = GPU_HOURS_BETWEEN_FAILURES,
) -> list[ScaleRow]:
    """The recipe's batch on so many nodes: in turns on the same GPUs, and sampled all the time on GPUs of their own.

    A recipe with engines on GPUs of their own is planned in that way only, with its own bounds of staleness.

    Args:
        config: of the recipe; its batch stays as it is.
        request_of: from a recipe, GPUs, and those of them that only generate, to what is planned.
        num_nodes: of the run, 1 or more.
        gpus_per_node: of each.
        tail: 99th percentile of response lengths over their median.
        gpu_hours_between_failures: of one GPU with its share of node and network.

    Returns:
        Rows; empty if no layout fits.
    """
    num_gpus = num_nodes * gpus_per_node
    found: list[tuple[PlanRequest, AssessedLayout, Mode]] = []
    is_apart = config.rollout.placement == "disaggregated"
    if not is_apart:
        found += _planned(config, request_of, num_gpus, 0, IN_TURN)
    mode = _mode_of(config) if is_apart else AHEAD
    candidates = [
        planned
        for share in sorted({round(share * num_nodes) for share in ROLLOUT_SHARES} - {0, num_nodes})
        for planned in _planned(
            with_engines_apart(config, share * gpus_per_node), request_of, num_gpus, share * gpus_per_node, mode
        )
    ]
    if candidates:
        found.append(min(candidates, key=lambda planned: _bound(planned[0], planned[1].time)))
    return [
        _row(config, request, assessed, mode, tail, gpu_hours_between_failures) for request, assessed, mode in found
    ]


def _planned(
    config: RunConfig,
    request_of: Callable[[RunConfig, int, int], PlanRequest],
    num_gpus: int,
    num_rollout_gpus: int,
    mode: Mode,
) -> Iterator[tuple[PlanRequest, AssessedLayout, Mode]]:
    """The recipe's own layout if it is for so many GPUs and fits, else the planner's choice; nothing if none fits."""
    if (num_rollout_gpus or num_gpus) % config.rollout.ranks_per_engine:
        return
    request = request_of(config, num_gpus, num_rollout_gpus)
    plan = make_plan(request)
    chosen = plan.own if plan.own is not None and plan.own.fits else plan.choice
    if chosen is not None:
        yield request, chosen, mode


def _mode_of(config: RunConfig) -> Mode:
    rollout = config.rollout
    return Mode(
        max_staleness=rollout.max_staleness,
        partial=rollout.partial,
        over_sample=rollout.over_sample,
        stragglers=rollout.stragglers,
        is_stepwise=not rollout.is_continuous,
    )


def _bound(request: PlanRequest, time: StepTime) -> float:
    """Seconds of the slower side if both are always busy."""
    return max(_full_generation(request), time.score + time.train) + time.push


def _full_generation(request: PlanRequest) -> float:
    """Seconds of a step's responses in engines that are full until the end."""
    rates = decode_rates(request, engine_of(request), decoded=_decoded(request))
    responses = request.batch.num_responses / request.num_engines
    together = min(rates.together, responses)
    steps = responses * request.batch.mean_response_tokens / together
    return steps * (rates.fixed + together * rates.per_sequence) + responses * rates.prefill


def _decoded(request: PlanRequest) -> float:
    """Sequences that an engine decodes together, about."""
    return max(1.0, min(request.engine.max_sequences, request.batch.num_responses / request.num_engines))


def _num_trained(request: PlanRequest) -> int:
    return num_parameters(request.shape, request.adapter) if request.adapter.is_on else request.shape.num_parameters


def _row(
    config: RunConfig, request: PlanRequest, assessed: AssessedLayout, mode: Mode, tail: float, gpu_hours: float
) -> ScaleRow:
    simulation = simulation_of(request, assessed.time, group_size=config.rollout.group_size, tail=tail)
    result = simulation.run(mode)
    step_s = _steady(result.seconds, mode)
    in_turn = result if mode == IN_TURN else simulation.run(IN_TURN)
    generate_s = statistics.mean(in_turn.seconds) - simulation.rates.train_s - simulation.rates.push_s
    failures = failures_of(
        request.cluster.num_gpus,
        num_parameters=_num_trained(request),
        snapshot_s=_snapshot(request, assessed.layout),
        in_background=config.checkpoint.async_save,
        gpu_hours_between_failures=gpu_hours,
    )
    save_steps = max(1, round(failures.best_interval() / step_s))
    own = config.checkpoint.every_steps
    return ScaleRow(
        num_gpus=request.cluster.num_gpus,
        num_rollout_gpus=request.cluster.num_rollout_gpus,
        mode=mode,
        assessed=assessed,
        generate_s=generate_s,
        step_s=step_s,
        tokens=request.batch.num_responses * request.batch.mean_prompt_tokens + result.tokens / len(result.seconds),
        engines_idle=1 - result.busy * (statistics.mean(result.seconds) / generate_s if mode == IN_TURN else 1.0),
        stragglers_s=generate_s - _full_generation(request) if mode == IN_TURN else _steady(result.waited, mode),
        mean_staleness=statistics.mean(_settled(result, simulation)),
        failures=failures,
        save_steps=save_steps,
        goodput=failures.goodput(save_steps * step_s),
        recipe_save_steps=own,
        recipe_goodput=failures.goodput(own * step_s) if own else 0.0,
    )


def _snapshot(request: PlanRequest, layout: Layout) -> float:
    """Seconds of a save that ranks are held up by: each gathers the optimizer of its share and copies it to its host.

    The bytes are those that docs/many_nodes.md counts: 12 a parameter of the rank's share on their way, 20 on the host.
    """

    def trained(stage: int) -> StageParameters:
        if request.adapter.is_on:
            return adapter_parameters(request.shape, layout, stage, request.adapter)
        return stage_parameters(request.shape, layout, stage, request.vocab_multiple)

    parameters = max(trained(stage).num_elements for stage in {0, layout.pipeline - 1})
    replicas = layout.data * layout.context
    gathered = (
        12 * parameters * (replicas - 1) / replicas / (request.cluster.gpu.network_bytes_per_s * BYTES_EFFICIENCY)
    )
    return gathered + 20 * parameters / HOST_BYTES


def simulation_of(request: PlanRequest, time: StepTime, *, group_size: int, tail: float = TAIL) -> Simulation:
    """The request's engines and trainer under the run's own scheduler, with lengths whose mean is the request's."""
    rates = decode_rates(request, engine_of(request), decoded=_decoded(request))
    lengths = lengths_of(request.batch, tail)
    # prompts cost a simulated engine nothing, so each is charged to the tokens of its response
    per_sequence = rates.per_sequence + rates.prefill / request.batch.mean_response_tokens
    return Simulation(
        rates=Rates(
            decode_s=rates.fixed,
            decode_per_sequence_s=per_sequence,
            train_s=time.score + time.train,
            push_s=time.push,
        ),
        lengths=functools.cache(lambda group: lengths.of_group(group, group_size, 0)),
        num_engines=request.num_engines,
        max_concurrent=rates.together,
        groups_per_step=max(1, request.batch.num_responses // group_size),
        group_size=group_size,
        num_steps=NUM_STEPS,
    )


def lengths_of(batch: Batch, tail: float) -> Lengths:
    """Lognormal lengths that the limit cuts, whose mean after the cut is the batch's."""
    limit, sigma, normal = batch.max_response_tokens, math.log(tail) / P99, NormalDist()

    def mean(mu: float) -> float:
        below = math.exp(mu + sigma**2 / 2) * normal.cdf((math.log(limit) - mu - sigma**2) / sigma)
        return below + limit * (1 - normal.cdf((math.log(limit) - mu) / sigma))

    low, high = 0.0, math.log(limit) + 4 * sigma
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean(middle) < batch.mean_response_tokens else (low, middle)
    return Lengths(median=math.exp(low), p99_over_median=tail, longest=limit)


def _steady(seconds: list[float], mode: Mode) -> float:
    return statistics.mean(seconds if mode == IN_TURN else seconds[WARM_STEPS:-WARM_STEPS])


def _settled(result: Result, simulation: Simulation) -> list[int]:
    """Staleness of the groups of the steps that count."""
    skipped = WARM_STEPS * simulation.groups_per_step
    return result.staleness[skipped:-skipped]
