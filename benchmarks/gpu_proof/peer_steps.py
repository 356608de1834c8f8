"""A training step by ours and by TRL on one GPU, in turns, for as long as there is time."""

import importlib.util
import time
from contextlib import ExitStack

from benchmarks.gpu_proof.report import Report, Section
from benchmarks.gpu_proof.sizes import Sizes
from benchmarks.gpu_proof.training_runs import lacking
from benchmarks.peer_sizes import GPU_ARMS, SIZES
from benchmarks.peer_step import bench, medians, ratios, run_arm

FIRST_ARMS, LAST_ARMS = GPU_ARMS[:2], GPU_ARMS[2:]
"""The first two take turns twice, before the others are run once each."""

STEPS = 6
SMALL_STEPS = 4
LONGEST_RUN_S = 150.0
"""Of one arm. Starts and imports take most of it: an estimate."""

FIGURES = {
    "step_s": ("whole step", "s"),
    "rollout_s": ("generation", "s"),
    "score_s": ("scoring", "s"),
    "update_s": ("update", "s"),
    "weight_sync_s": ("push", "s"),
    "rest_s": ("the rest of a step", "s"),
    "sharing_s": ("of it to leave the GPU to each other", "s"),
    "tokens": ("response tokens of a step", "tokens"),
    "gpu_peak_gib": ("peak of GPU memory, all processes", "GiB"),
    "run_s": ("the whole run", "s"),
}

ABOUT = {
    "ours": "GTPO, Megatron and Ray; engine and trainer sleep in turns; entropies by the trainer's scoring pass",
    "trl": "GRPO, as it comes: weights of float32, products in bfloat16; nothing sleeps",
    "trl_asleep": "its engine sleeps while it trains",
    "trl_bfloat16": "its weights and Adam's moments are bfloat16",
    "ours_sampler_entropies": "entropies by the sampler, no scoring pass",
}


def missing() -> str:
    """What a step of TRL's needs and is not here; empty if nothing."""
    absent = [name for name in ("trl", "datasets") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} not installed" if absent else ""


def steps(report: Report, sizes: Sizes, *, until: float) -> None:
    """A section for each run, and one of their medians.

    Args:
        report: report of the part.
        sizes: all sizes.
        until: value of ``time.perf_counter`` when the last run must have ended.
    """
    is_gpu = sizes.device.type == "cuda"
    if reason := lacking(sizes.device) or missing():
        with report.section("a step beside TRL's") as section:
            section.skip(reason)
        return
    size, is_tiny = SIZES[sizes.peer_step], sizes.peer_step == "tiny"
    arms = FIRST_ARMS if is_tiny else (*FIRST_ARMS, *FIRST_ARMS[::-1], *LAST_ARMS)
    found: dict[str, list[dict[str, float]]] = {}
    with ExitStack() as stack:
        with report.section("a model for both") as section:
            shared, millions = stack.enter_context(
                bench(size, device="cuda" if is_gpu else "cpu", steps=SMALL_STEPS if is_tiny else STEPS, eager=True)
            )
            section.figure("its parameters", millions, "10^6")
        if section.status != "passed":
            return
        for number, arm in enumerate(arms):
            with report.section(f"run {number + 1} of {len(arms)}: {arm}") as section:
                left = until - time.perf_counter()
                longest = max((row["run_s"] for rows in found.values() for row in rows), default=0.0)
                expected = found[arm][0]["run_s"] if arm in found else longest
                if left < expected:
                    section.skip(f"{left:.0f} s are left, and this run would take some {expected:.0f}")
                    continue
                row = run_arm(arm, shared, min(left, LONGEST_RUN_S))
                found.setdefault(arm, []).append(row)
                section.figure("what it is", ABOUT[arm])
                _figures(section, row)
    with report.section(f"a step of {size.responses} responses of {size.response_tokens} tokens") as section:
        if not found:
            section.skip("no run ended")
        for arm, rows in found.items():
            for name, value in medians(rows).items():
                if name in FIGURES:
                    what, unit = FIGURES[name]
                    section.figure(f"{what}, {arm}", value, unit, runs=len(rows))
        for name, value in ratios(found).items():
            section.figure(f"ours over TRL's, {name}", value)


def _figures(section: Section, row: dict[str, float]) -> None:
    for name, (what, unit) in FIGURES.items():
        if name in row:
            section.figure(what, row[name], unit)
