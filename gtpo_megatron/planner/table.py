"""A plan for people: what was chosen and why, bytes by part and phase, the next best, and why the others do not fit."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from gtpo_megatron.planner.hardware import GIB
from gtpo_megatron.planner.layout import Layout
from gtpo_megatron.planner.phases import PARTS, PHASES, GPUMemory, Phase, engine_of, node_host
from gtpo_megatron.planner.plan import Plan
from gtpo_megatron.planner.search import Verdict

NUM_SHOWN = 8
"""Layouts of each table, unless all are asked for."""

MIN_WIDTH = 110
"""Columns of the page; a narrower terminal breaks its lines, which reads better than tables of three letters."""


def print_plan(plan: Plan, console: Console, *, show_all: bool = False) -> None:
    """Prints the whole page.

    Args:
        plan: to show.
        console: where.
        show_all: every layout; else the best few, those that differ in their chunks only once.
    """
    console.width = max(MIN_WIDTH, console.width)
    _print_head(plan, console)
    _print_verdict(plan, console)
    shown = plan.own or plan.choice or (plan.misses[0] if plan.misses else None)
    if shown is not None:
        gpus = plan.stages(shown.layout)
        whose = "the recipe's " if shown is plan.own else ""
        _title(
            console, f"{whose}{shown.layout} ({_flags(shown.layout)}): GiB by part, on the fullest GPU of each phase"
        )
        console.print(_memory_table(gpus, shown))
        _title(console, "the same by pipeline stage: GiB while training, and the peak")
        console.print(_stage_table(gpus, shown))
        _print_host(plan, gpus, shown, console)
    if plan.fitting:
        _title(console, f"{len(plan.fitting)} layouts fit, best first; seconds are estimates")
        console.print(_fitting_table(_rows(plan.fitting, show_all)))
    if plan.misses:
        _title(console, f"{len(plan.misses)} layouts do not fit, even with full recomputation; closest first")
        console.print(_misses_table(_rows(plan.misses, show_all)))


def _rows(verdicts: Sequence[Verdict], show_all: bool) -> list[Verdict]:
    """All of them, or the first of each kind that differs in more than the number of chunks."""
    if show_all:
        return list(verdicts)
    first: dict[tuple[int, ...], Verdict] = {}
    for verdict in verdicts:
        layout = verdict.layout
        first.setdefault((layout.tensor, layout.pipeline, layout.context, layout.expert), verdict)
    return list(first.values())[:NUM_SHOWN]


def _print_head(plan: Plan, console: Console) -> None:
    request = plan.request
    cluster, batch, engine = request.cluster, request.batch, request.engine
    active = f" ({request.shape.num_active_parameters / 1e9:.2f} B active)" if request.shape.experts else ""
    where = (
        "colocated: every GPU generates and trains in turn"
        if cluster.is_colocated
        else f"disaggregated: {cluster.num_trainer_gpus} GPUs train, {cluster.num_rollout_gpus} generate"
    )
    memory = engine_of(request)
    sequences = memory.sequences_in_cache(engine.cache_bytes, batch.max_sequence_tokens)
    lines = (
        f"[bold]{request.name}[/]: {request.model}, {request.shape.num_parameters / 1e9:.2f} B parameters{active}",
        f"{cluster.num_gpus} GPU(s) of {cluster.gpu_memory / GIB:g} GiB, {cluster.gpus_per_node} a node, {where}",
        f"a step: {batch.num_responses} responses of at most {batch.max_sequence_tokens} tokens, {batch.num_updates} "
        f"update(s) of {batch.num_update_responses}, micro-batches of {batch.largest_micro_batch} tokens",
        f"{request.num_engines} vLLM engine(s) of {engine.tensor} GPU(s): a cache of {engine.cache_bytes / GIB:g} GiB "
        f"a GPU holds {sequences} sequences of full length, {engine.max_sequences} are decoded together",
    )
    for line in lines:
        console.print(line, highlight=False)
    if sequences < 1:
        advice = "raise rollout.kv_cache_mib or rollout.tensor_parallel_size"
        console.print(f"[yellow]not one sequence of full length fits into the cache: {advice}[/]", highlight=False)


def _print_verdict(plan: Plan, console: Console) -> None:
    console.print()
    own, choice = plan.own, plan.choice
    if own is not None:
        word, colour = ("fits", "green") if own.fits else ("does not fit", "red")
        console.print(
            f"[bold {colour}]the recipe's layout {word}[/]: {own.layout} ({_flags(own.layout)}): {own.reason()}",
            highlight=False,
        )
    if choice is not None:
        time = choice.time
        console.print(
            f"[bold]the planner's choice[/]: {choice.layout} ({_flags(choice.layout)}): {choice.reason()}; about "
            f"{time.total:.0f} s a step: generate {time.generate:.0f}, score {time.score:.0f}, train {time.train:.0f}, "
            f"push {time.push:.0f}",
            highlight=False,
        )
        return
    console.print("[bold red]no layout fits[/]; what would help:", highlight=False)
    for suggestion in plan.suggestions or ["nothing that was tried: this model needs more or larger GPUs"]:
        console.print(f"  {suggestion}", highlight=False)


def _memory_table(gpus: Sequence[GPUMemory], shown: Verdict) -> Table:
    """Every part in every phase, on the GPU that is fullest in that phase."""
    table = _table()
    table.add_column("part")
    phases = [phase for phase in PHASES if any(phase in gpu.phases for gpu in gpus)]
    fullest = {phase: _fullest(gpus, phase) for phase in phases}
    for phase in phases:
        table.add_column(f"{phase}\n{fullest[phase].role}", justify="right")
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


def _stage_table(gpus: Sequence[GPUMemory], shown: Verdict) -> Table:
    """Every kind of GPU: what training takes, and its peak."""
    columns = PARTS[: PARTS.index("output layer") + 1]
    table = _table()
    table.add_column("GPU")
    for name in (*columns, "peak"):
        table.add_column(name, justify="right")
    table.add_column("in")
    for gpu in gpus:
        train = gpu.phases.get("train", {})
        sizes = (_gib(train.get(part, 0)) for part in columns)
        table.add_row(gpu.role, *sizes, _against(gpu.peak, shown.capacity), gpu.peak_phase)
    return table


def _print_host(plan: Plan, gpus: Sequence[GPUMemory], shown: Verdict, console: Console) -> None:
    ranks = [gpu for gpu in gpus if gpu.role != "engine"]
    nodes = [node_host(plan.request, gpu) for gpu in ranks]
    fullest = max(nodes, key=lambda parts: sum(parts.values()))
    parts = ", ".join(f"{what} {size / GIB:.0f}" for what, size in fullest.items())
    limit = f" of {shown.host_capacity / GIB:.0f}" if shown.host_capacity else ", not checked (--host-memory)"
    console.print(
        f"host memory of a node: {shown.host_bytes / GIB:.0f} GiB{limit}: {parts}",
        highlight=False,
    )


def _fitting_table(verdicts: Sequence[Verdict]) -> Table:
    table = _table()
    names = ("layout", "recompute", "peak", "free", "fullest in", "host GiB", "score s", "train s", "step s")
    for name in names:
        table.add_column(name, justify="left" if name in ("layout", "recompute", "fullest in") else "right")
    for verdict in verdicts:
        table.add_row(
            str(verdict.layout),
            verdict.layout.recompute,
            f"{verdict.worst.peak / GIB:.1f}",
            f"{-verdict.overflow / GIB:.1f}",
            f"{verdict.peak_phase}, {verdict.worst.role}",
            f"{verdict.host_bytes / GIB:.0f}",
            f"{verdict.time.score:.1f}",
            f"{verdict.time.train:.1f}",
            f"{verdict.time.total:.0f}",
        )
    return table


def _misses_table(verdicts: Sequence[Verdict]) -> Table:
    table = _table()
    table.add_column("layout", no_wrap=True)
    table.add_column("why", overflow="fold")
    for verdict in verdicts:
        table.add_row(str(verdict.layout), verdict.reason())
    return table


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False)


def _title(console: Console, text: str) -> None:
    """Above a table, not in it: a table's own title is broken at the table's width."""
    console.print(f"\n[bold]{text}[/]", highlight=False)


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
