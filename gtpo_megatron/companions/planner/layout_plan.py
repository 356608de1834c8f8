"""The plan: what fits, what to take, why the others do not fit, and what would help if nothing does."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gtpo_megatron.companions.planner.layout import Layout
from gtpo_megatron.companions.planner.phases import GPUMemory, engine_gpu, engine_of, trainer_gpu
from gtpo_megatron.companions.planner.request import PlanRequest
from gtpo_megatron.companions.planner.search import AssessedLayout, assess, assess_all
from gtpo_megatron.companions.planner.step_time import shares_of
from gtpo_megatron.companions.planner.suggestions import suggestions


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All layouts, assessed.

    Attributes:
        request: request that was planned.
        own: the recipe's layout; None if it is for another number of ranks.
        fitting: layouts that fit, best first, each with the least recomputation that does.
        misses: layouts that do not fit even with full recomputation, closest first.
        suggestions: changes that would make something fit, if nothing does.
        next_command: how to train so, if a model was named and no recipe; else empty.
    """

    request: PlanRequest
    own: AssessedLayout | None
    fitting: Sequence[AssessedLayout]
    misses: Sequence[AssessedLayout]
    suggestions: Sequence[str]
    next_command: str = ""

    @property
    def choice(self) -> AssessedLayout | None:
        """The layout to take; None if nothing fits."""
        return self.fitting[0] if self.fitting else None

    def gpus(self, layout: Layout) -> list[GPUMemory]:
        """Every kind of GPU under a layout: each stage's, and the engine's if it has GPUs of its own."""
        gpus = [trainer_gpu(self.request, layout, stage) for stage in range(layout.pipeline)]
        return gpus if self.request.cluster.is_colocated else [*gpus, engine_gpu(self.request, layout)]

    @property
    def sequences_in_cache(self) -> int:
        """How many sequences of full length an engine's cache holds."""
        sequence_tokens = self.request.batch.max_sequence_tokens
        return engine_of(self.request).sequences_in_cache(self.request.engine.cache_bytes, sequence_tokens)


def make_plan(request: PlanRequest) -> Plan:
    """Assesses every layout, and the recipe's own."""
    fitting, misses = assess_all(request)
    return Plan(
        request=request,
        own=None if request.own_layout is None else assess(request, request.own_layout),
        fitting=fitting,
        misses=misses,
        suggestions=[] if fitting else suggestions(request),
    )


def plan_to_plain(plan: Plan) -> dict[str, Any]:
    """Values that ``--json`` prints: dictionaries, lists, numbers and strings; bytes as integers, seconds as floats."""
    request, shown = plan.request, plan.own or plan.choice
    numbers = {"num_engines": request.num_engines, "sequences_in_cache": plan.sequences_in_cache}
    return {
        "name": request.name,
        "model": request.model,
        "num_parameters": request.shape.num_parameters,
        "num_active_parameters": request.shape.num_active_parameters,
        "expert_imbalance": request.expert_imbalance,
        "cluster": asdict(request.cluster) | {"is_colocated": request.cluster.is_colocated},
        "batch": asdict(request.batch),
        "shares": asdict(shares_of(request)),
        "engine": asdict(request.engine) | asdict(engine_of(request)) | numbers,
        "own": plan.own and _assessed(plan.own),
        "choice": plan.choice and _assessed(plan.choice),
        "stages": [asdict(gpu) | _peak(gpu) for gpu in plan.gpus(shown.layout)] if shown else [],
        "fitting": [_assessed(assessed) for assessed in plan.fitting],
        "misses": [_assessed(assessed) for assessed in plan.misses],
        "suggestions": list(plan.suggestions),
        "next_command": plan.next_command,
    }


def _assessed(assessed: AssessedLayout) -> dict[str, Any]:
    return {
        "layout": asdict(assessed.layout) | {"data": assessed.layout.data},
        "fits": assessed.fits,
        "reason": assessed.reason(),
        **_peak(assessed.worst),
        "peak_role": assessed.worst.role,
        "overflow_bytes": assessed.overflow,
        "largest_parts": dict(assessed.largest_parts),
        "host_bytes": assessed.host_bytes,
        "host_overflow_bytes": assessed.host_overflow,
        "estimated_seconds": asdict(assessed.time),
    }


def _peak(gpu: GPUMemory) -> dict[str, Any]:
    return {"peak_bytes": gpu.peak, "peak_phase": gpu.peak_phase}
