"""Compares runs whose bits depend on the clock: every prompt must be accounted for, once."""

from pathlib import Path
from typing import Any

from gtpo_megatron.companions.verify_resume.compare import Comparison
from gtpo_megatron.orchestration.loop.controller import ROLLOUTS_FILE
from gtpo_megatron.orchestration.loop.group_scheduler import labels_sum
from gtpo_megatron.run_folder.metrics_file import METRICS_FILE, read_metrics
from gtpo_megatron.weights.megatron.restricted_pickle import load_torch

PLACES = ("trained", "dropped", "under_way")


def check_account(run: Path, checkpoint: Path, *, num_steps: int) -> list[Comparison]:
    """Checks a continuous run that was killed and resumed.

    Args:
        run: folder of the run.
        checkpoint: its last.
        num_steps: of the run.

    Raises:
        DataError: the run has no metrics.
    """
    rows = [row for row in read_metrics(run / METRICS_FILE) if row["step"] > 0]
    state = load_torch(checkpoint / ROLLOUTS_FILE)["scheduled"]
    return [
        Comparison(part="steps", compared=f"{len(rows)} rows", difference=_steps_difference(rows, num_steps)),
        Comparison(
            part="numbers of prompts", compared=f"{len(rows)} rows", difference=next(filter(None, map(_sums, rows)), "")
        ),
        Comparison(
            part="every prompt once", compared=f"{state['drawn']} prompts", difference=_labels_difference(state)
        ),
    ]


def _steps_difference(rows: list[dict[str, Any]], num_steps: int) -> str:
    steps = [int(row["step"]) for row in rows]
    return "" if steps == list(range(1, num_steps + 1)) else f"steps {steps}, expected 1 to {num_steps}"


def _sums(row: dict[str, Any]) -> str:
    drawn, *places = (int(row[f"prompts/{name}_count"]) for name in ("drawn", *PLACES))
    named = ", ".join(f"{name} {count}" for name, count in zip(PLACES, places, strict=True))
    return "" if drawn == sum(places) else f"step {int(row['step'])}: drawn {drawn}, but {named}"


def _labels_difference(state: dict[str, Any]) -> str:
    """Trained, dropped and under way together are the labels from 0 on, each once."""
    found = (state["closed_sum"] + labels_sum([*state["ready"], *state["waiting"]])) % (1 << 64)
    if found == labels_sum(range(state["drawn"])):
        return ""
    return f"the groups that are trained, dropped or under way are not the {state['drawn']} drawn ones, each once"
