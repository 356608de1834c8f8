"""Assesses layouts: whether each fits, where it is fullest, and how long a step would take."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gtpo_megatron.companions.planner.hardware import GIB, MIB
from gtpo_megatron.companions.planner.layout import Layout, Recompute, layers_of_stage, layouts, takes_layout
from gtpo_megatron.companions.planner.phases import (
    GPUMemory,
    Part,
    Phase,
    engine_gpu,
    engine_of,
    longest_sequence_bytes,
    node_host,
    trainer_gpu,
)
from gtpo_megatron.companions.planner.request import PlanRequest
from gtpo_megatron.companions.planner.step_time import StepTime, step_time
from gtpo_megatron.companions.planner.trainer_state import stage_parameters

ABOUT_AS_FAST = 1.1
"""Estimates are not better than this; within it, fewer communicating ranks decide: they fail and wait less."""


EQUALLY_FAST = 0.03
"""Estimates closer than this share of the fastest one are taken for equal, and fewer chunks per stage decide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AssessedLayout:
    """One layout, assessed.

    Attributes:
        layout: layout with its recomputation.
        worst: the GPU with the highest peak: a rank of one of the stages, or of an engine.
        capacity: bytes per GPU.
        time: estimated time of a step.
        host_bytes: host memory that the fullest node needs.
        host_capacity: host memory of a node; 0: not known, and not checked.
        cache_shortfall: bytes that an engine's cache lacks for one sequence of full length; negative or 0 if it has
            them. vLLM does not start without.
    """

    layout: Layout
    worst: GPUMemory
    capacity: float
    time: StepTime
    host_bytes: int
    host_capacity: float
    cache_shortfall: int

    @property
    def overflow(self) -> float:
        """Bytes past the GPU's memory; negative if there is room."""
        return self.worst.peak - self.capacity

    @property
    def host_overflow(self) -> float:
        """Bytes past the node's memory; negative or 0 if there is room, or if it is not known."""
        return self.host_bytes - self.host_capacity if self.host_capacity else 0

    @property
    def fits(self) -> bool:
        """On the GPUs, and in the nodes if their memory is known; and a sequence into the cache."""
        return self.overflow <= 0 and self.host_overflow <= 0 and self.cache_shortfall <= 0

    @property
    def seconds(self) -> float:
        """Estimated seconds of scoring and training, which depend on the trainer's layout."""
        return self.time.score + self.time.train

    @property
    def peak_phase(self) -> Phase:
        """When the worst GPU is fullest."""
        return self.worst.peak_phase

    @property
    def largest_parts(self) -> list[tuple[Part, int]]:
        """The parts of the worst GPU's peak, largest first."""
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
        if self.cache_shortfall > 0:
            return (
                f"an engine's cache lacks {math.ceil(self.cache_shortfall / MIB):,} MiB a GPU for one sequence of full "
                f"length"
            )
        return f"{where}, {-self.overflow / GIB:.1f} GiB free"


def assess(request: PlanRequest, layout: Layout) -> AssessedLayout:
    """Assesses a layout by the GPUs that can be fullest: the first stage's, the last one's, an engine's, and others'.

    Of the stages between that have equal layers, the first one holds the most activations, and it alone is assessed.
    """
    last = layout.pipeline - 1
    between = {layers_of_stage(request.shape, layout, stage): stage for stage in range(last - 1, 0, -1)}
    gpus = [trainer_gpu(request, layout, stage) for stage in sorted({0, *between.values(), last})]
    host = max(sum(node_host(request, gpu).values()) for gpu in gpus)
    if not request.cluster.is_colocated:
        gpus.append(engine_gpu(request, layout))
    widest = max(
        (
            stage_parameters(request.shape, layout, stage, request.vocab_multiple)
            for stage in {0, *between.values(), last}
        ),
        key=lambda parameters: parameters.num_elements,
    )
    return AssessedLayout(
        layout=layout,
        worst=max(gpus, key=lambda gpu: gpu.peak),
        capacity=request.cluster.gpu_memory,
        time=step_time(request, layout, widest, engine_of(request)),
        host_bytes=host,
        host_capacity=request.cluster.host_memory,
        cache_shortfall=longest_sequence_bytes(request) - request.engine.cache_bytes,
    )


def assess_all(request: PlanRequest) -> tuple[list[AssessedLayout], list[AssessedLayout]]:
    """Every layout: those that fit, best first, and those that do not, closest first.

    Of the layouts that fit and whose estimated seconds of scoring and training are within a tenth of the fastest one's,
    those with the fewest ranks that must talk to each other for a micro-batch come first; of equals the fastest.
    """
    fitting: list[AssessedLayout] = []
    misses: list[AssessedLayout] = []
    for layout in _layouts(request):
        assessed = least_recompute(request, layout)
        (fitting if assessed.fits else misses).append(assessed)
    return _in_order(fitting), sorted(misses, key=lambda v: (max(v.overflow, v.host_overflow), v.layout.virtual))


def anything_fits(request: PlanRequest) -> bool:
    """Whether ``assess_all`` would find a layout that fits, for a tenth of its work.

    With everything recomputed and each stage in one piece: more chunks never hold less.
    """
    return any(
        assess(request, replace(layout, recompute="full")).fits for layout in _layouts(request) if layout.virtual == 1
    )


def _layouts(request: PlanRequest) -> Iterator[Layout]:
    """Every layout of the model, of which its teacher, if it has one, can be split so too.

    Where replicas are to share frozen weights, there are some.
    """
    found = layouts(
        request.shape, num_ranks=request.cluster.num_trainer_gpus, gpus_per_node=request.cluster.gpus_per_node
    )
    if request.adapter.shard_frozen:
        has_experts = request.shape.experts is not None
        found = (one for one in found if one.data * one.context > 1 or (has_experts and one.expert_data > 1))
    return (layout for layout in found if request.teacher is None or takes_layout(request.teacher, layout))


def least_recompute(request: PlanRequest, layout: Layout) -> AssessedLayout:
    """The least recomputation that fits, in the order of ``Recompute``; full if none does."""
    assessed = assess(request, layout)
    if assessed.fits:
        return assessed
    fullest = assess(request, replace(layout, recompute="full"))
    if not fullest.fits:
        return fullest
    between: list[Recompute] = ["selective"]
    if request.shape.experts is not None:
        between.append("experts")
    for recompute in between:
        assessed = assess(request, replace(layout, recompute=recompute))
        if assessed.fits:
            return assessed
    return fullest


def _in_order(assessed_layouts: Sequence[AssessedLayout]) -> list[AssessedLayout]:
    """Those about as fast as the fastest first, fewest communicating ranks before more; then the slower ones."""
    fastest = min((assessed.seconds for assessed in assessed_layouts), default=0.0)

    def key(assessed: AssessedLayout) -> tuple[int, int, int, int, float]:
        layout, ratio = assessed.layout, assessed.seconds / fastest
        if ratio > ABOUT_AS_FAST:
            return 1, 0, 0, 0, ratio
        # times that round to the same step are equal: then fewer chunks and equal stages win
        simplicity = 2 * layout.virtual + (layout.last_layers is not None)
        return 0, layout.model_ranks, round(ratio / EQUALLY_FAST), simplicity, ratio

    return sorted(assessed_layouts, key=key)
