"""The plan: what fits, what to take, why the others do not fit, and what would help where nothing does."""

from collections.abc import Sequence
from dataclasses import dataclass

from gtpo_megatron.planner.layout import Layout
from gtpo_megatron.planner.phases import GPUMemory, engine_gpu, trainer_gpu
from gtpo_megatron.planner.request import PlanRequest
from gtpo_megatron.planner.search import Verdict, judge, judge_all
from gtpo_megatron.planner.suggestions import suggestions


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
    """Judges every layout, and the recipe's own."""
    fitting, misses = judge_all(request)
    return Plan(
        request=request,
        own=None if request.own_layout is None else judge(request, request.own_layout),
        fitting=fitting,
        misses=misses,
        suggestions=[] if fitting else suggestions(request),
    )
