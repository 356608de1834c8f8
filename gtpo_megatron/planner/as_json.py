"""A plan as plain data, for ``--json`` and for scripts."""

from dataclasses import asdict
from typing import Any

from gtpo_megatron.planner.phases import GPUMemory, engine_of
from gtpo_megatron.planner.plan import Plan
from gtpo_megatron.planner.search import Verdict


def plan_to_plain(plan: Plan) -> dict[str, Any]:
    """Dictionaries, lists, numbers and strings; bytes as integers, seconds as floats."""
    request = plan.request
    shown = plan.own if plan.own is not None else plan.choice
    engine = engine_of(request)
    return {
        "name": request.name,
        "model": request.model,
        "num_parameters": request.shape.num_parameters,
        "num_active_parameters": request.shape.num_active_parameters,
        "cluster": asdict(request.cluster) | {"is_colocated": request.cluster.is_colocated},
        "batch": asdict(request.batch),
        "engine": asdict(request.engine)
        | asdict(engine)
        | {
            "num_engines": request.num_engines,
            "sequences_in_cache": engine.sequences_in_cache(
                request.engine.cache_bytes, request.batch.max_sequence_tokens
            ),
        },
        "own": None if plan.own is None else _verdict(plan.own),
        "choice": None if plan.choice is None else _verdict(plan.choice),
        "stages": [] if shown is None else [_gpu(gpu) for gpu in plan.stages(shown.layout)],
        "fitting": [_verdict(verdict) for verdict in plan.fitting],
        "misses": [_verdict(verdict) for verdict in plan.misses],
        "suggestions": list(plan.suggestions),
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "layout": asdict(verdict.layout) | {"data": verdict.layout.data},
        "fits": verdict.fits,
        "reason": verdict.reason(),
        "peak_bytes": verdict.worst.peak,
        "peak_phase": verdict.peak_phase,
        "peak_role": verdict.worst.role,
        "overflow_bytes": verdict.overflow,
        "largest_parts": dict(verdict.largest_parts),
        "host_bytes": verdict.host_bytes,
        "host_overflow_bytes": verdict.host_overflow,
        "estimated_seconds": asdict(verdict.time),
    }


def _gpu(gpu: GPUMemory) -> dict[str, Any]:
    return {
        "role": gpu.role,
        "peak_bytes": gpu.peak,
        "peak_phase": gpu.peak_phase,
        "phases": {phase: dict(parts) for phase, parts in gpu.phases.items()},
        "host": dict(gpu.host),
    }
