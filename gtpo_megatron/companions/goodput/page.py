"""Prints what a step costs at each number of nodes."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gtpo_megatron.companions.goodput.failures import HOUR
from gtpo_megatron.companions.goodput.scale import ScaleRow
from gtpo_megatron.sentence import print_sentence

MIN_WIDTH = 140


def print_scale(name: str, rows: Sequence[ScaleRow], console: Console) -> None:
    """Two tables: a step's seconds, and what failures leave of them."""
    console.width = max(MIN_WIDTH, console.width)
    batch = f"{rows[0].tokens / 1e6:.1f} million tokens a step" if rows else "no layout fits"
    told = f": {batch}, the recipe's batch at every size; seconds, all estimates"
    print_sentence(console, Text.assemble((name, "bold"), told))
    if not rows:
        return
    steps = _table("GPUs", "engines", "trainer")
    _numbers(steps, "generate", "stragglers", "score", "train", "push", "step", "tokens/s/GPU", "idle", "stale")
    lost = _table("GPUs", "engines")
    _numbers(lost, "fails every", "a save", "a restart", "best: save every", "goodput", "recipe: save every", "goodput")
    _numbers(lost, "tokens/s/GPU")
    for row in rows:
        where = "all" if not row.num_rollout_gpus else f"{row.num_rollout_gpus} of their own"
        time = row.time
        steps.add_row(
            f"{row.num_gpus:,}",
            where,
            f"{row.assessed.layout}",
            *(f"{value:.0f}" for value in (row.generate_s, row.stragglers_s)),
            *(f"{value:.0f}" for value in (time.score, time.train, time.push, row.step_s)),
            f"{row.tokens_per_second_and_gpu:,.0f}",
            f"{row.engines_idle:.0%}",
            f"{row.mean_staleness:.1f}",
        )
        own = (f"{row.recipe_save_steps} steps", f"{row.recipe_goodput:.1%}") if row.recipe_save_steps else ("end", "")
        lost.add_row(
            f"{row.num_gpus:,}",
            where,
            f"{row.failures.mtbf / HOUR:,.0f} h",
            f"{row.failures.held_up:.1f}",
            f"{row.failures.restart:.0f}",
            f"{row.save_steps} steps, {row.save_steps * row.step_s / 60:.0f} min",
            f"{row.goodput:.1%}",
            *own,
            f"{row.tokens_per_second_and_gpu * row.goodput:,.0f}",
        )
    console.print(steps)
    console.print()
    print_sentence(console, Text("what failures leave of it", style="bold"))
    console.print(lost)
    print_sentence(
        console,
        "published steps took 1.5 to 2.0 times their estimates: take the seconds so often; "
        "docs/planning_reference.md says which runs, and what is assumed here",
    )


def _table(*left: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True)
    return table


def _numbers(table: Table, *names: str) -> None:
    for name in names:
        table.add_column(name, justify="right")


def row_to_plain(row: ScaleRow) -> dict[str, Any]:
    """Values that ``--json`` prints; seconds, tokens, shares from 0 to 1."""
    return {
        "num_gpus": row.num_gpus,
        "num_rollout_gpus": row.num_rollout_gpus,
        "max_staleness": row.mode.max_staleness,
        "partial": row.mode.partial,
        "over_sample": row.mode.over_sample,
        "layout": str(row.assessed.layout),
        "recompute": row.assessed.layout.recompute,
        "generate_s": row.generate_s,
        "score_s": row.time.score,
        "train_s": row.time.train,
        "push_s": row.time.push,
        "step_s": row.step_s,
        "tokens_per_step": row.tokens,
        "tokens_per_second_and_gpu": row.tokens_per_second_and_gpu,
        "engines_idle": row.engines_idle,
        "stragglers_s": row.stragglers_s,
        "mean_staleness": row.mean_staleness,
        "mean_time_between_failures_s": row.failures.mtbf,
        "save_holds_up_s": row.failures.held_up,
        "restart_s": row.failures.restart,
        "save_every_steps": row.save_steps,
        "goodput": row.goodput,
        "recipe_save_every_steps": row.recipe_save_steps,
        "recipe_goodput": row.recipe_goodput,
    }
