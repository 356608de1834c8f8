"""Prints a plan: the choice and its reason, bytes by part and phase, the next best, and why the others do not fit."""

import math
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gtpo_megatron.companions.planner.hardware import GIB, MIB
from gtpo_megatron.companions.planner.layout import Layout
from gtpo_megatron.companions.planner.layout_plan import Plan
from gtpo_megatron.companions.planner.phases import PARTS, PHASES, GPUMemory, Phase, node_host
from gtpo_megatron.companions.planner.request import PlanRequest
from gtpo_megatron.companions.planner.search import AssessedLayout
from gtpo_megatron.companions.planner.step_time import shares_of
from gtpo_megatron.orchestration.cpu_memory import Taken, said_by_part, what_lowers
from gtpo_megatron.sentence import print_sentence

NUM_SHOWN = 8
"""Layouts of each table, unless all are asked for."""

MIN_WIDTH = 110
"""Columns of the page; a narrower terminal breaks its lines, which reads better than tables of three letters."""


def print_plan(plan: Plan, console: Console, *, on_cpu: Sequence[Taken] = (), show_all: bool = False) -> None:
    """Prints the whole page.

    Args:
        plan: to show.
        console: to print to.
        on_cpu: what the run takes on a machine without GPUs; empty: not said.
        show_all: every layout; else the best few, those that differ in their chunks only once.
    """
    console.width = max(MIN_WIDTH, console.width)
    for line in (*_head(plan), "", *_conclusion(plan)):
        print_sentence(console, line)
    shown = plan.own or plan.choice or (plan.misses[0] if plan.misses else None)
    if shown is not None:
        gpus = plan.gpus(shown.layout)
        whose = "the recipe's " if shown is plan.own else ""
        _print_table(
            console,
            f"{whose}{shown.layout} ({_flags(shown.layout)}): GiB by part, on the fullest GPU of each phase",
            _memory_table(gpus, shown),
        )
        _print_table(console, "the same by pipeline stage: GiB while training, and the peak", _stage_table(gpus, shown))
        print_sentence(console, _host(plan, gpus, shown))
        print_sentence(console, _object_store(plan.request))
    if on_cpu:
        print_sentence(
            console,
            f"on one machine's CPUs instead: {said_by_part(on_cpu)}; a lower {what_lowers(on_cpu)} takes less",
        )
    if plan.fitting:
        title = (
            f"{len(plan.fitting)} layouts fit, best first; seconds are estimates, and published steps took 1.5 to 2.0 "
            f"times theirs"
        )
        _print_table(console, title, _fitting_table(_rows(plan.fitting, show_all)))
    if plan.misses:
        title = f"{len(plan.misses)} layouts do not fit, even with full recomputation; closest first"
        _print_table(console, title, _misses_table(_rows(plan.misses, show_all)))


def _rows(layouts: Sequence[AssessedLayout], show_all: bool) -> list[AssessedLayout]:
    """All of them, or the first of each kind that differs in more than the number of chunks."""
    if show_all:
        return list(layouts)
    first: dict[tuple[int, ...], AssessedLayout] = {}
    for assessed in layouts:
        layout = assessed.layout
        first.setdefault(
            (layout.tensor, layout.pipeline, layout.context, layout.expert, layout.expert_tensor), assessed
        )
    return list(first.values())[:NUM_SHOWN]


def _head(plan: Plan) -> Iterable[str | Text]:
    request = plan.request
    cluster, batch, engine, sequences = request.cluster, request.batch, request.engine, plan.sequences_in_cache
    active = f" ({request.shape.num_active_parameters / 1e9:.2f} B active)" if request.shape.experts else ""
    where = f"disaggregated: {cluster.num_trainer_gpus} GPUs train, {cluster.num_rollout_gpus} generate"
    if cluster.is_colocated:
        where = "colocated: every GPU generates and trains in turn"
    size = f"{request.shape.num_parameters / 1e9:.2f} B parameters{active}"
    yield Text.assemble((request.name, "bold"), f": {request.model}, {size}")
    yield f"{cluster.num_gpus} GPU(s) of {cluster.gpu_memory / GIB:g} GiB, {cluster.gpus_per_node} a node, {where}"
    yield (
        f"a step: {batch.num_responses} responses of at most {batch.max_sequence_tokens} tokens, {batch.num_updates} "
        f"update(s) of {batch.num_update_responses}, micro-batches of {batch.largest_micro_batch} tokens"
    )
    kind = ", which share experts whole" if engine.expert_parallel else ""
    if engine.stages > 1 or engine.nodes > 1:
        kind = f" ({engine.stages} stage(s) of {engine.tensor}, on {engine.nodes} node(s)){kind}"
    yield (
        f"{request.num_engines} vLLM engine(s) of {engine.num_gpus} GPU(s){kind}: a cache of "
        f"{engine.cache_bytes / GIB:g} GiB a GPU holds {sequences} sequences of full length, {engine.max_sequences} "
        f"are decoded together"
    )
    if request.shape.experts is not None:
        yield (
            f"experts: {request.shape.experts.num_experts} in each of {request.shape.num_expert_layers} layers, "
            f"{request.shape.experts.experts_per_token} for a token; the busiest rank is taken to receive "
            f"{request.expert_imbalance:g} times the mean (--expert-imbalance)"
        )
    yield shares_of(request).said(has_experts=request.shape.experts is not None)
    if sequences < 1:
        advice = "raise rollout.kv_cache_mib or rollout.tensor_parallel_size"
        yield Text(f"not one sequence of full length fits into the cache: {advice}", style="yellow")


def _conclusion(plan: Plan) -> Iterable[str | Text]:
    own, choice = plan.own, plan.choice
    if own is not None:
        word, colour = ("fits", "green") if own.fits else ("does not fit", "red")
        yield Text.assemble(
            (f"the recipe's layout {word}", f"bold {colour}"), f": {own.layout} ({_flags(own.layout)}): {own.reason()}"
        )
    if choice is not None:
        time = choice.time
        yield Text.assemble(
            ("the planner's choice", "bold"),
            f": {choice.layout} ({_flags(choice.layout)}): {choice.reason()}; about {time.total:.0f} s a step: "
            f"generate {time.generate:.0f}, score {time.score:.0f}, train {time.train:.0f}, push {time.push:.0f}",
        )
        if plan.next_command:
            yield f"to train so: {plan.next_command}"
        return
    yield Text.assemble(("no layout fits", "bold red"), "; what would help:")
    for suggestion in plan.suggestions or ["nothing that was tried: this model needs more or larger GPUs"]:
        yield f"  {suggestion}"


def _memory_table(gpus: Sequence[GPUMemory], shown: AssessedLayout) -> Table:
    """Every part in every phase, on the GPU that is fullest in that phase."""
    phases = [phase for phase in PHASES if any(phase in gpu.phases for gpu in gpus)]
    fullest = {phase: _fullest(gpus, phase) for phase in phases}
    table = _table("part", right=[f"{phase}\n{fullest[phase].role}" for phase in phases])
    for part in PARTS:
        sizes = [fullest[phase].phases[phase].get(part, 0) for phase in phases]
        if any(sizes):
            table.add_row(part, *(_gib(size) for size in sizes))
    table.add_section()
    totals = [sum(fullest[phase].phases[phase].values()) for phase in phases]
    table.add_row("total", *(_against(total, shown.capacity) for total in totals), style="bold")
    return table


def _fullest(gpus: Sequence[GPUMemory], phase: Phase) -> GPUMemory:
    return max((gpu for gpu in gpus if phase in gpu.phases), key=lambda gpu: sum(gpu.phases[phase].values()))


def _stage_table(gpus: Sequence[GPUMemory], shown: AssessedLayout) -> Table:
    """Every kind of GPU: what training takes, and its peak."""
    trained = [gpu.phases.get("train", {}) for gpu in gpus]
    columns = [part for part in PARTS[: PARTS.index("output layer") + 1] if any(part in parts for parts in trained)]
    table = _table("GPU", right=[*columns, "peak"])
    table.add_column("in")
    for gpu, parts in zip(gpus, trained, strict=True):
        sizes = (_gib(parts.get(part, 0)) for part in columns)
        table.add_row(gpu.role, *sizes, _against(gpu.peak, shown.capacity), gpu.peak_phase)
    return table


def _host(plan: Plan, gpus: Sequence[GPUMemory], shown: AssessedLayout) -> str:
    nodes = [node_host(plan.request, gpu) for gpu in gpus if gpu.role != "engine"]
    fullest = max(nodes, key=lambda parts: sum(parts.values()))
    parts = ", ".join(f"{what} {size / GIB:.0f}" for what, size in fullest.items())
    limit = f" of {shown.host_capacity / GIB:.0f}" if shown.host_capacity else ", not checked (--host-memory)"
    return f"host memory of a node: {shown.host_bytes / GIB:.0f} GiB{limit}: {parts}"


def _object_store(request: PlanRequest) -> str | Text:
    """Whether the responses that are under way fit into Ray's object store; those that do not are spilled to disk."""
    needed, has = request.stored_bytes, request.object_store_bytes
    line = f"object store of a node: {has / MIB:,.0f} MiB, of which responses take at most {needed / MIB:,.0f}"
    if needed <= has:
        return line
    advice = f"Ray writes the rest to disk; --cluster.object-store-mib {math.ceil(1.1 * needed / MIB)}"
    return Text(f"{line}: {advice}", style="yellow")


def _fitting_table(layouts: Sequence[AssessedLayout]) -> Table:
    table = _table(
        "layout", "recompute", "fullest in", right=("peak", "free", "host GiB", "score s", "train s", "step s")
    )
    for assessed in layouts:
        memory = (assessed.worst.peak / GIB, -assessed.overflow / GIB)
        seconds = (assessed.time.score, assessed.time.train)
        table.add_row(
            str(assessed.layout),
            assessed.layout.recompute,
            f"{assessed.peak_phase}, {assessed.worst.role}",
            *(f"{number:.1f}" for number in memory),
            f"{assessed.host_bytes / GIB:.0f}",
            *(f"{number:.1f}" for number in seconds),
            f"{assessed.time.total:.0f}",
        )
    return table


def _misses_table(layouts: Sequence[AssessedLayout]) -> Table:
    table = _table()
    table.add_column("layout", no_wrap=True)
    table.add_column("why", overflow="fold")
    for assessed in layouts:
        table.add_row(str(assessed.layout), assessed.reason())
    return table


def _table(*left: str, right: Iterable[str] = ()) -> Table:
    """A table with columns of words, then columns of numbers."""
    table = Table(*left, box=box.SIMPLE_HEAD, show_edge=False)
    for name in right:
        table.add_column(name, justify="right")
    return table


def _print_table(console: Console, title: str, table: Table) -> None:
    """The title is a line above it: a table's own title is broken at the table's width."""
    console.print(Text(f"\n{title}", style="bold"))
    console.print(table)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if size else ""


def _against(total: int, capacity: float) -> str:
    return f"[{'green' if total <= capacity else 'red'}]{total / GIB:.2f}[/]"


def _flags(layout: Layout) -> str:
    flags = [f"recompute {layout.recompute}"]
    if layout.sequence_parallel:
        flags.insert(0, "sequence parallel")
    if not layout.distributed_optimizer:
        flags.insert(0, "optimizer not distributed")
    return ", ".join(flags)
