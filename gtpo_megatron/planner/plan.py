"""Evaluates every layout, picks one, and says why the others do not fit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gtpo_megatron.planner.engine import divides_engine
from gtpo_megatron.planner.hardware import GIB
from gtpo_megatron.planner.layout import RECOMPUTES, Layout, layouts
from gtpo_megatron.planner.phases import GPUMemory, Part, Phase, engine_gpu, engine_of, trainer_gpu
from gtpo_megatron.planner.request import PlanRequest
from gtpo_megatron.planner.step_time import StepTime, step_time
from gtpo_megatron.planner.trainer_state import stage_parameters

ABOUT_AS_FAST = 1.1
"""Estimates are not better than this; within it, fewer communicating ranks decide: they fail and wait less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One layout, judged.

    Attributes:
        layout: with its recomputation.
        worst: the GPU with the highest peak: a rank of one of the stages, or of an engine.
        capacity: bytes of a GPU.
        time: of a step, estimated.
        host_bytes: of the fullest node.
        host_capacity: of a node; 0: not known, and not checked.
    """

    layout: Layout
    worst: GPUMemory
    capacity: int
    time: StepTime
    host_bytes: int
    host_capacity: int

    @property
    def overflow(self) -> int:
        """Bytes past the GPU's memory; negative where there is room."""
        return self.worst.peak - self.capacity

    @property
    def host_overflow(self) -> int:
        """Bytes past the node's memory; negative or 0 where there is room, or where it is not known."""
        return self.host_bytes - self.host_capacity if self.host_capacity else 0

    @property
    def fits(self) -> bool:
        """On the GPUs, and in the nodes where their memory is known."""
        return self.overflow <= 0 and self.host_overflow <= 0

    @property
    def seconds(self) -> float:
        """Of the stages that the trainer's layout changes."""
        return self.time.score + self.time.train

    @property
    def peak_phase(self) -> Phase:
        """When the worst GPU is fullest."""
        return self.worst.peak_phase

    @property
    def largest_parts(self) -> list[tuple[Part, int]]:
        """Of the worst GPU's peak, largest first."""
        return sorted(self.worst.phases[self.peak_phase].items(), key=lambda row: -row[1])

    def reason(self) -> str:
        """Why it fits or does not, in one line."""
        where = f"{self.worst.peak / GIB:.1f} GiB in {self.peak_phase} on {self.worst.role}"
        if self.overflow > 0:
            parts = ", ".join(f"{part} {size / GIB:.1f}" for part, size in self.largest_parts[:3])
            return f"{where}: {self.overflow / GIB:.1f} GiB too much ({parts})"
        if self.host_overflow > 0:
            return (
                f"a node needs {self.host_bytes / GIB:.0f} GiB of host memory, "
                f"{self.host_overflow / GIB:.0f} GiB too much"
            )
        return f"{where}, {-self.overflow / GIB:.1f} GiB free"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All verdicts.

    Attributes:
        request: what was planned.
        own: the recipe's layout; None where it is not one for so many ranks.
        fitting: layouts that fit, best first, each with the least recomputation that does.
        misses: layouts that do not fit however much is recomputed, closest first.
        suggestions: what else would make something fit, where nothing does.
    """

    request: PlanRequest
    own: Verdict | None
    fitting: Sequence[Verdict]
    misses: Sequence[Verdict]
    suggestions: Sequence[str]

    @property
    def choice(self) -> Verdict | None:
        """The layout to take; None where nothing fits."""
        return self.fitting[0] if self.fitting else None

    def stages(self, layout: Layout) -> list[GPUMemory]:
        """Every kind of GPU under a layout: each stage, and the engine's where it has GPUs of its own."""
        gpus = [trainer_gpu(self.request, layout, stage) for stage in range(layout.pipeline)]
        return gpus if self.request.cluster.is_colocated else [*gpus, engine_gpu(self.request)]


def make_plan(request: PlanRequest) -> Plan:
    """Judges every layout.

    Of the layouts that fit and whose estimated seconds of scoring and training are within a tenth of the fastest one's,
    the one with the fewest ranks that must talk to each other for a micro-batch is chosen; of equals the fastest.
    """
    fitting, misses = _judge_all(request)
    own = None if request.own_layout is None else judge(request, request.own_layout)
    return Plan(
        request=request,
        own=own,
        fitting=fitting,
        misses=misses,
        suggestions=[] if fitting else list(_suggestions(request)),
    )


def judge(request: PlanRequest, layout: Layout) -> Verdict:
    """Looks at the GPUs that can be fullest: the first two stages, the last one, an engine's."""
    last = layout.pipeline - 1
    gpus = [trainer_gpu(request, layout, stage) for stage in sorted({0, min(1, last), last})]
    host = max(_host_bytes(request, gpu) for gpu in gpus)
    if not request.cluster.is_colocated:
        gpus.append(engine_gpu(request))
    widest = max(
        (stage_parameters(request.shape, layout, stage, request.vocab_multiple) for stage in {0, last}),
        key=lambda parameters: parameters.num_elements,
    )
    return Verdict(
        layout=layout,
        worst=max(gpus, key=lambda gpu: gpu.peak),
        capacity=request.cluster.gpu_memory,
        time=step_time(request, layout, widest, engine_of(request)),
        host_bytes=host,
        host_capacity=request.cluster.host_memory,
    )


def _host_bytes(request: PlanRequest, gpu: GPUMemory) -> int:
    """A node full of such ranks, with one buffer of the whole model in shared memory for the push."""
    ranks = min(request.cluster.gpus_per_node, request.cluster.num_trainer_gpus)
    return ranks * sum(gpu.host.values()) + request.shape.num_parameters * request.engine.weight_bytes


def _judge_all(request: PlanRequest) -> tuple[list[Verdict], list[Verdict]]:
    fitting: list[Verdict] = []
    misses: list[Verdict] = []
    nodes = request.cluster.gpus_per_node
    for layout in layouts(request.shape, num_ranks=request.cluster.num_trainer_gpus, gpus_per_node=nodes):
        verdict = least_recompute(request, layout)
        (fitting if verdict.fits else misses).append(verdict)
    return _in_order(fitting), sorted(misses, key=lambda v: (max(v.overflow, v.host_overflow), v.seconds))


def least_recompute(request: PlanRequest, layout: Layout) -> Verdict:
    """The first of no, selective and full recomputation that fits; full where none does."""
    verdict = judge(request, layout)
    for recompute in RECOMPUTES[1:]:
        if verdict.fits:
            break
        verdict = judge(request, replace(layout, recompute=recompute))
    return verdict


def _in_order(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Those about as fast as the fastest first, fewest communicating ranks before more; then the slower ones."""
    fastest = min((verdict.seconds for verdict in verdicts), default=0.0)

    def key(verdict: Verdict) -> tuple[bool, int, float]:
        is_slower = verdict.seconds > ABOUT_AS_FAST * fastest
        return is_slower, 0 if is_slower else verdict.layout.model_ranks, verdict.seconds

    return sorted(verdicts, key=key)


def _suggestions(request: PlanRequest) -> Iterator[str]:
    """Changes that would make something fit, each tried by planning again."""
    for text, changed in _changes(request):
        fitting, _ = _judge_all(changed)
        if fitting:
            best = fitting[0]
            yield f"{text}: {best.layout}, recompute {best.layout.recompute}, {best.reason()}"


def _changes(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    batch, engine, cluster = request.batch, request.engine, request.cluster
    if batch.micro_batch_tokens > batch.max_sequence_tokens:
        smallest = replace(batch, micro_batch_tokens=batch.max_sequence_tokens)
        yield (
            f"--update.micro-batch-tokens {batch.max_sequence_tokens} (one sequence at a time)",
            replace(request, batch=smallest),
        )
    if engine.cache_bytes > 2 * GIB:
        half = replace(engine, cache_bytes=engine.cache_bytes // 2)
        yield f"--rollout.kv-cache-mib {half.cache_bytes >> 20}", replace(request, engine=half)
    if engine.tensor * 2 <= cluster.gpus_per_node and divides_engine(request.shape, engine.tensor * 2):
        wider = replace(engine, tensor=engine.tensor * 2)
        if cluster.num_engine_gpus % wider.tensor == 0:
            yield f"--rollout.tensor-parallel-size {wider.tensor}", replace(request, engine=wider)
    for factor in (2, 4, 8):
        larger = replace(cluster, num_gpus=cluster.num_gpus * factor)
        yield f"--gpus {larger.num_gpus}", replace(request, cluster=larger, own_layout=None)
