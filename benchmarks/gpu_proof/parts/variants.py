"""Other ways to compute the fused output layer, beside the present one: which of them should be the default.

First each candidate by itself, the most promising ones first, until the time is used up: errors, then a few rounds in
turns with cuBLAS's bare products. Then the best of them and the present one in turns, and the verdict. That is done
once for candidates whose products are cuBLAS's, and again for kernels of our own, which could take what follows along.
"""

import time
from collections.abc import Mapping, Sequence

from benchmarks.gpu_proof.report import Report, Section
from benchmarks.gpu_proof.sizes import Sizes
from benchmarks.gpu_proof.variants.candidate import Candidate, Pass
from benchmarks.gpu_proof.variants.catalogue import candidates, has_triton
from benchmarks.gpu_proof.variants.measure import Layer, Timing
from benchmarks.gpu_proof.variants.steps import steps
from gtpo_megatron.companions.preflight.checks.kernels import BOUNDS

SECONDS: tuple[dict[Pass, float], ...] = (
    {"scores": 80.0, "training": 60.0},
    {"scores": 110.0, "training": 80.0},
    {"scores": 30.0, "training": 10.0},
)
"""By stage, for the candidates of a pass by themselves; the rest of the part takes about a minute."""

GOALS: dict[Pass, float] = {"scores": 0.85, "training": 0.88}
"""Shares of cuBLAS's rate that are asked for."""

FINALISTS = 6

ALONE_ROUNDS = 3

TWO_ERRORS = 2.0
"""Of two ways, each of which may be as far off as the bound; a tile that is read too early is much farther."""

GAIN = 1.02
"""By so much a candidate must beat the present way at every shape to become the default."""

Found = dict[str, dict[str, float]]
"""Share of cuBLAS's rate by candidate and by layer."""


def run(report: Report, sizes: Sizes) -> None:
    layers: list[Layer] = []
    with report.section("inputs") as section:
        layers += [Layer(size, sizes.device) for size in sizes.heads]
        section.figure("Triton", "there" if has_triton(sizes.device.type) else "absent: only variants that need none")
        if sizes.device.type == "cpu":
            section.figure("streams", "one: there is no GPU")
    if len(layers) < len(sizes.heads):
        return
    for layer in layers:
        with report.section(f"steps of a tile, {layer.size.name}") as section:
            for name, seconds in steps(layer, rounds=sizes.rounds):
                section.figure(name, seconds * 1e6, "microseconds")
    catalogue = candidates(sizes.device.type, small=sizes.heads[0].tokens < 1024)
    chosen: dict[Pass, Found] = {"scores": {}, "training": {}}
    for stage, allowed in enumerate(SECONDS):
        for kind, ways in catalogue.items():
            tried = [way for way in ways if way.stage == stage]
            if kind == "training" and (both := mixed(catalogue, chosen)) is not None:
                ways.append(both)
                tried.insert(0, both)
            found = _alone(report, layers, kind, tried, allowed[kind])
            if not found:
                continue
            name, shares = _verdict(report, layers, kind, ways, chosen[kind] | found, sizes.rounds, stage)
            chosen[kind] = {name: shares}


def mixed(catalogue: Mapping[Pass, Sequence[Candidate]], chosen: Mapping[Pass, Found]) -> Candidate | None:
    """The best scores, with the gradients of the best training, if that has others; else None."""
    (scores,), (training,) = (list(chosen[kind]) or ["present"] for kind in ("scores", "training"))
    name = f"scores of {scores}; gradients of {training}"
    ways = {kind: {way.name: way for way in row} for kind, row in catalogue.items()}
    if training == scores or training.startswith(f"scores of {scores};") or name in ways["training"]:
        return None
    gradients = ways["training"][training].gradients
    return Candidate(name=name, partials=ways["scores"][scores].partials, gradients=gradients)


def _alone(report: Report, layers: Sequence[Layer], kind: Pass, ways: Sequence[Candidate], seconds: float) -> Found:
    """A section a candidate; returns those that are right, with their shares."""
    found: Found = {}
    began = time.perf_counter()
    for way in ways:
        with report.section(f"{kind}: {way.name}") as section:
            if time.perf_counter() - began > seconds:
                section.skip(f"{seconds:g} s were used up by those before it")
                continue
            exact = BOUNDS["bfloat16" if layers[0].device.type == "cuda" else "float32"]
            beside = {name: TWO_ERRORS * bound for name, bound in exact.items()}
            shares: dict[str, float] = {}
            for layer in layers:
                _right(section, layer.size.name, "against float64", exact, layer.errors(way, kind))
                _right(section, layer.size.name, "beside the present way", beside, layer.beside_present(way, kind))
                timing = layer.rates([way], kind, ALONE_ROUNDS if layer.device.type == "cuda" else 1)[way.name]
                _figures(section, f"alone, {layer.size.name}", timing, layer.flops(kind))
                shares[layer.size.name] = timing.share
            if section.status == "passed":
                found[way.name] = shares
    return found


def _right(section: Section, layer: str, beside: str, bounds: Mapping[str, float], errors: Mapping[str, float]) -> None:
    for name, error in errors.items():
        is_gradient = name.startswith("gradient")
        bound = bounds["gradients" if is_gradient else "scores"]
        section.require(f"{name} {beside}, {layer}", error, "" if is_gradient else "nats", at_most=bound)


def _figures(section: Section, name: str, timing: Timing, flops: float) -> None:
    section.figure(
        f"share of cuBLAS's rate {name}",
        timing.share,
        milliseconds=timing.seconds * 1e3,
        milliseconds_of_the_host=timing.host * 1e3,
        tflops=flops / timing.seconds / 1e12,
    )


def _verdict(
    report: Report,
    layers: Sequence[Layer],
    kind: Pass,
    ways: Sequence[Candidate],
    found: Found,
    rounds: int,
    stage: int,
) -> tuple[str, dict[str, float]]:
    """The best of those that are right, in turns with the present way; the default to be, with its shares."""
    best = sorted(found, key=lambda name: -min(found[name].values(), default=0.0))
    names = ["present", *[name for name in best if name != "present"][:FINALISTS]]
    finalists = [next(way for way in ways if way.name == name) for name in names]
    shares: Found = {name: {} for name in names}
    stages = f"stage {stage + 1} of {len(SECONDS)}"
    for layer in layers:
        with report.section(f"{kind}, {stages}, in turns: {layer.size.name}") as section:
            if layer.device.type == "cuda":
                for way in finalists:
                    section.figure(f"memory, {way.name}", layer.memory(way, kind) / (1 << 20), "MiB")
            for name, timing in layer.rates(finalists, kind, rounds).items():
                _figures(section, f"in turns, {name}", timing, layer.flops(kind))
                shares[name][layer.size.name] = timing.share
    chosen = choice(shares, [layer.size.name for layer in layers])
    with report.section(f"{kind}, {stages}: verdict") as section:
        section.figure("would be the default", chosen)
        for name, share in shares[chosen].items():
            beside = shares["present"].get(name, float("nan"))
            section.figure(f"its share of cuBLAS's rate, {name}", share, present=beside, asked_for=GOALS[kind])
    return chosen, shares[chosen]


def choice(shares: Found, layers: Sequence[str]) -> str:
    """The fastest that is right at every shape: its smaller share is the largest.

    The present way stays where none is `GAIN` times as fast at every shape.
    """
    present = shares.get("present", {})
    better = {
        name: min(row.values())
        for name, row in shares.items()
        if name != "present" and all(row.get(layer, 0.0) >= GAIN * present.get(layer, 0.0) > 0 for layer in layers)
    }
    return max(better, key=better.__getitem__, default="present")
