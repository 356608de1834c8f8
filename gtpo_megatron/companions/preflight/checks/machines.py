"""Software and hardware of every node, before any model is loaded."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from packaging.requirements import Requirement

from gtpo_megatron.companions.planner.phases import node_host, trainer_gpu
from gtpo_megatron.companions.planner.step_time import HOST_BYTES
from gtpo_megatron.companions.preflight.context import PreflightContext
from gtpo_megatron.companions.preflight.expectations import Expectations, gib, rate
from gtpo_megatron.companions.preflight.probes import devices, system
from gtpo_megatron.companions.preflight.result import CheckResult, assessed, bounded, not_here, noted
from gtpo_megatron.companions.preflight.runner import Results
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.orchestration.cpu_memory import memory_needed, what_lowers
from gtpo_megatron.rollout.engine_checks import is_cpu_build
from gtpo_megatron.weights.config_json import read_architecture

SLOWEST = 1.1
"""Seconds of the slowest GPU over the median: equal boards differ by a few percent, a sick one by more."""

SLOWEST_CORE = 3.0
"""The same of cores, which the ranks share with each other and with everything else on the machine."""

CLOCK_SHARE = 0.7
"""Of its highest clock that a working GPU keeps: power limits take a quarter of it at most."""

COPY_SHARE = 0.75
"""Of the rate between pinned host memory and a GPU that the planner assumes."""


def versions(context: PreflightContext) -> Results:
    """The same on every node, and those that this package asks for."""
    found = context.ask(context.one_per_host, system.software)
    hosts = {context.processes.hosts[name]: versions for name, versions in found.items()}
    yield same_everywhere(hosts)
    extra = "cpu" if is_cpu_build() else "gpu"
    yield pinned(next(iter(hosts.values())), system.pins(extra), extra)


def same_everywhere(hosts: Mapping[str, Mapping[str, str]]) -> CheckResult:
    """Fails if a version differs between nodes; names the distribution and two nodes."""
    first, *others = hosts
    differing = [
        f"{name} {hosts[first].get(name, 'missing')} on {first}, {hosts[other].get(name, 'missing')} on {other}"
        for other in others
        for name in sorted({*hosts[first], *hosts[other]})
        if hosts[first].get(name) != hosts[other].get(name)
    ]
    shown = ", ".join(f"{name} {version}" for name, version in hosts[first].items())
    return assessed(
        f"versions on {len(hosts)} node(s)",
        "; ".join(differing) or shown,
        is_good=not differing,
        expected="the same on all",
        remedy="give all nodes one environment: a folder that all of them see, or one container image",
    )


def pinned(found: Mapping[str, str], pins: Mapping[str, Requirement], extra: str) -> CheckResult:
    """Fails if a distribution is not of the version that was tested."""
    wrong = [
        f"{name} {found[name]}, wanted {pins[name].specifier}"
        for name in sorted(pins.keys() & found.keys())
        if not pins[name].specifier.contains(found[name].partition("+")[0], prereleases=True)
    ]
    compared = sorted(pins.keys() & found.keys())
    if not compared:
        return not_here("tested versions", f"the package is not installed with its extra {extra!r}")
    return assessed(
        "tested versions",
        "; ".join(wrong) or f"{', '.join(compared)} as tested",
        is_good=not wrong,
        expected=f"those of gtpo-megatron[{extra}]",
        remedy=f"uv pip install 'gtpo-megatron[{extra}]'; other versions may work, and nobody has tried them",
    )


def hosts(context: PreflightContext) -> Results:
    """Cores, memory and shared memory of every node, against what the run takes there."""
    found = context.ask(context.one_per_host, system.machine)
    yield gpus(context)
    for name, machine in found.items():
        host = context.processes.hosts[name]
        if context.has_gpus or context.config.cluster.address:
            yield host_memory(host, machine, context.config, context.expected)
        else:
            yield cpu_memory(host, machine, context.config)
        yield shared_memory(host, machine, context.config, has_gpus=context.has_gpus)


def gpus(context: PreflightContext) -> CheckResult:
    """Whether every process has its GPUs, all of one kind."""
    if not context.has_gpus:
        return not_here("GPUs", "no GPU: ranks and engines run on CPUs")
    wanted = dict.fromkeys(context.processes.ranks, 1)
    if context.config.rollout.placement != "colocated":
        wanted |= dict.fromkeys(context.processes.engines, context.config.rollout.ranks_per_node)
    wrong = [
        f"{name} on {context.processes.hosts[name]} has {len(context.devices[name])} of {count}"
        for name, count in wanted.items()
        if len(context.devices[name]) != count
    ]
    kinds = Counter(device.name for name in wanted for device in context.devices[name])
    return assessed(
        "GPUs",
        "; ".join(wrong) or ", ".join(f"{count} x {kind}" for kind, count in kinds.items()),
        is_good=not wrong and len(kinds) == 1,
        expected="one for each rank, all of one kind",
        remedy="nvidia-smi on that node, and what the batch system has given (--gpus-per-node, --constraint)",
    )


def host_memory(host: str, machine: Mapping[str, int], config: RunConfig, expected: Expectations) -> CheckResult:
    """Memory of a node against the plan's fullest node."""
    measured = f"{machine['cores']} cores, {gib(machine['memory'])}, {gib(machine['available'])} free"
    figures = {"cores": float(machine["cores"]), "free_bytes": float(machine["available"])}
    if expected.request is None:
        return noted(f"memory of {host}", measured, why="host memory is planned for GPUs only", figures=figures)
    request = expected.request
    assert request.own_layout is not None, "the recipe has as many GPUs as ranks"
    stages = range(config.parallel.pipeline_parallel_size)
    needed = max(sum(node_host(request, trainer_gpu(request, request.own_layout, stage)).values()) for stage in stages)
    return assessed(
        f"memory of {host}",
        measured,
        is_good=machine["memory"] >= needed,
        expected=f"at least {gib(needed)}, by the plan",
        remedy="take nodes with more memory, or see gtpo-megatron plan --host-memory for layouts that need less",
        figures=figures,
    )


def cpu_memory(host: str, machine: Mapping[str, int], config: RunConfig) -> CheckResult:
    """Free memory of the machine, against what a whole run takes on its CPUs."""
    free = machine["available"]
    parts = memory_needed(config, read_architecture(Path(config.model.path)), free_bytes=free)
    needed = sum(one.num_bytes for one in parts)
    return assessed(
        f"memory of {host}",
        f"{machine['cores']} cores, {gib(machine['memory'])}, {gib(free)} free",
        is_good=free >= needed,
        expected=f"at least {gib(needed)} free",
        remedy=f"end what else runs there, or lower {what_lowers(parts)}",
        figures={"cores": float(machine["cores"]), "free_bytes": float(free), "needed_bytes": float(needed)},
    )


def shared_memory(host: str, machine: Mapping[str, int], config: RunConfig, *, has_gpus: bool) -> CheckResult:
    """Free bytes of ``/dev/shm`` against Ray's object store and the slots of pushes."""
    rollout, sync = config.rollout, config.weight_sync
    slots = 2 * sync.bucket_mib * rollout.num_engines * rollout.ranks_per_engine
    has_slots = config.transport(has_gpus=has_gpus) == "shared_memory"
    needed = (config.cluster.object_store_mib + (slots if has_slots else 0)) << 20
    return assessed(
        f"/dev/shm of {host}",
        f"{gib(machine['shared'])} free",
        is_good=machine["shared"] >= needed,
        expected=f"at least {gib(needed)}: object store and buckets of pushes",
        remedy="give the container more (--shm-size), or lower --cluster.object-store-mib and --weight-sync.bucket-mib",
        figures={"free_bytes": float(machine["shared"])},
    )


def clocks(context: PreflightContext) -> Results:
    """The same product on every GPU at once: results, stragglers, clocks, share of the bfloat16 rate."""
    processes, ranks = context.processes, context.processes.ranks
    shares = context.config.rollout.placement == "colocated" or not context.has_gpus
    names = ranks if shares else (*ranks, *processes.engines)
    answers = context.ask_children(names, f"{devices.__name__}:matrix_products", {})
    yield from of_devices(
        {f"{name} on {processes.hosts[name]}": answer for name, answer in answers.items()}, context.expected
    )


def of_devices(answers: Mapping[str, Mapping[str, Any]], expected: Expectations) -> Iterator[CheckResult]:
    """What ``devices.matrix_products`` has measured, by process."""
    found = {
        (label if device == "cpu" else f"{label} ({device})"): (answer, device)
        for label, answer in answers.items()
        for device in answer["seconds"]
    }
    is_gpu = any(device != "cpu" for _, device in found.values())
    wrong = [label for label, (answer, device) in found.items() if device in answer["wrong"]]
    seconds = {label: answer["seconds"][device] for label, (answer, device) in found.items()}
    yield assessed(
        f"results of {len(found)} {'GPUs' if is_gpu else 'cores'}",
        f"wrong on {', '.join(wrong)}" if wrong else "right on all",
        is_good=not wrong,
        expected="exact integers",
        remedy="take this node out (sbatch --exclude) and have the board tested",
    )
    yield stragglers(seconds, slowest=SLOWEST if is_gpu else SLOWEST_CORE)
    flops = next(iter(answers.values()))["flops"]
    yield matrix_rate(flops / median(seconds.values()), expected)
    yield host_copies(
        {label: answer["copies"][device] for label, (answer, device) in found.items() if device in answer["copies"]}
    )
    for label, (answer, device) in found.items():
        if result := working_clock(label, answer["clocks"].get(device, {})):
            yield result


def stragglers(seconds: Mapping[str, float], *, slowest: float) -> CheckResult:
    """Names the slowest, and fails if it takes more than ``slowest`` times the median's seconds."""
    name = max(seconds, key=lambda one: seconds[one])
    middle = median(seconds.values())
    times = seconds[name] / middle
    return assessed(
        f"stragglers among {len(seconds)}",
        f"slowest: {name}, {times:.2f} times the median ({1e3 * seconds[name]:.2f} ms, median {1e3 * middle:.2f})",
        is_good=times <= slowest,
        expected=f"at most {slowest:g} times",
        remedy=f"every step waits for {name}: look for another program on it, for heat and power limits (nvidia-smi -q "
        f"-d PERFORMANCE), or leave its node out",
        figures={"slowest_over_median": times, "median_s": middle},
    )


def matrix_rate(flops: float, expected: Expectations) -> CheckResult:
    """Operations a second of the median device against the planner's assumption."""
    least = expected.matrix_flops
    share = f", {flops / expected.gpu.bf16_flops:.0%} of the bfloat16 rate" if expected.gpu else ""
    return bounded(
        "matrix products",
        f"{flops / 1e12:.3g} TFLOP/s{share}",
        is_good=flops >= (least or 0.0),
        expected=f"at least {(least or 0.0) / 1e12:.0f} TFLOP/s",
        remedy="look at clocks and power limits (nvidia-smi -q -d CLOCK,POWER); the plan's seconds assume this rate",
        unknown=expected.why_no_rates if least is None else None,
        figures={"flops": flops},
    )


def host_copies(rates: Mapping[str, float]) -> CheckResult:
    """The slowest GPU's rate to and from pinned host memory, over which pushes and the optimizer's state travel."""
    if not rates:
        return not_here("copies between GPU and host", "no GPU")
    name = min(rates, key=lambda one: rates[one])
    least = COPY_SHARE * HOST_BYTES
    return assessed(
        "copies between GPU and host",
        f"{rate(rates[name])} ({name})",
        is_good=rates[name] >= least,
        expected=f"at least {rate(least)}",
        remedy="nvidia-smi -q -d PCIE shows a link below its width; or processes are bound to the other socket's cores",
        figures={"bytes_per_s": rates[name]},
    )


def working_clock(label: str, clock: Mapping[str, float]) -> CheckResult | None:
    """A GPU's clock while it works; None if nvidia-smi does not say."""
    now, most = clock.get("clocks.sm"), clock.get("clocks.max.sm")
    if now is None or not most:
        return None
    reasons = int(clock.get("clocks_throttle_reasons.active", 0)) & devices.THROTTLED
    more = "".join(
        f", {clock[name]:.0f} {unit}" for name, unit in (("temperature.gpu", "C"), ("power.draw", "W")) if name in clock
    )
    return assessed(
        f"clock of {label}",
        f"{now:.0f} of {most:.0f} MHz{more}" + (f", slowed down (reasons {reasons:#x})" if reasons else ""),
        is_good=now >= CLOCK_SHARE * most,
        expected=f"at least {CLOCK_SHARE:.0%} of its highest",
        remedy="nvidia-smi -q -d PERFORMANCE says why: heat, a power limit, or clocks that somebody set",
        figures={"mhz": now, "share": now / most},
    )
