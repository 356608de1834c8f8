"""The summary of a finished run, from which tables and curves of a study are made."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from gtpo_megatron.companions.report.sampled_groups import TokenKind, all_groups
from gtpo_megatron.companions.report.token_classes import kinds_of_tokens
from gtpo_megatron.companions.study.plan import MAX_SEED, PlannedRun, Study, digest, fingerprint, portable
from gtpo_megatron.config.serialize import load_config, to_plain
from gtpo_megatron.errors import DataError
from gtpo_megatron.run_folder.folder import CONFIG_FILE
from gtpo_megatron.run_folder.metrics_file import METRICS_FILE, read_metrics
from gtpo_megatron.run_folder.provenance import LOG_FILE, logged_provenance
from gtpo_megatron.untrusted.text import printable

CURVES = (
    "eval/heldout_mean_at_k",
    "eval/heldout_interval_low",
    "eval/heldout_interval_high",
    "eval/heldout_pass_at_k",
    "rollout/reward_mean",
    "rollout/response_length_tokens",
    "policy/entropy_nats",
    "credit/one_sided_groups_frac",
    "credit/correct_tokens_negative_frac",
    "credit/incorrect_tokens_positive_frac",
    "credit/effective_frac_correct",
    "credit/effective_frac_incorrect",
)
"""Metrics whose curves are kept."""
MAX_VALUE = 1e15
"""Largest value of a curve or a cost, so that sums of them stay finite."""
_ANEW = "move the folder elsewhere, and the study trains the run anew"
SIDES = (TokenKind.CORRECT, TokenKind.INCORRECT)
_SUMS = {
    "training_s": ("timing/step_s", "timing/evaluation_s", "timing/checkpoint_s"),
    "responses": ("rollout/responses_count",),
    "response_tokens": ("rollout/response_tokens_count",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRun:
    """One finished run.

    Attributes:
        arm: name of the arm.
        seed: seed of the run.
        num_steps: its number of steps.
        fingerprint: fingerprint of its configuration.
        config: the configuration, without this machine's folders.
        provenance: versions, commit and machine of the run.
        curves: pairs of step and value, by metric.
        cost: seconds of training, responses and response tokens, summed over the steps.
        kinds: statistics by kind of token, of the sampled responses: share of the tokens, mean entropy in nats,
            and the credit of correct and of incorrect ones; empty in older summaries.
    """

    arm: str
    seed: int
    num_steps: int
    fingerprint: str
    config: dict[str, Any]
    provenance: dict[str, Any]
    curves: dict[str, list[tuple[int, float]]]
    cost: dict[str, float]
    kinds: dict[str, dict[str, float | None]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.arm}_seed{self.seed}"

    @property
    def commit(self) -> str:
        """Commit of the run; several separated by commas if it was resumed on another."""
        return printable(str(self.provenance.get("commit", "unknown")))

    def at_end(self, metric: str, *, last_steps: int = 1) -> float | None:
        """The metric's mean over the last steps; None if it was not measured at all of them."""
        before = max(0, self.num_steps - last_steps)
        last = [value for step, value in self.curves.get(metric, ()) if step > before]
        return fmean(last) if len(last) == last_steps else None

    def at_start(self, metric: str) -> float | None:
        """The metric's value before training; None if it was not measured then."""
        points = self.curves.get(metric)
        return points[0][1] if points and points[0][0] == 0 else None


def summarise(planned: PlannedRun, run_dir: Path) -> FinishedRun:
    """Reads a finished run.

    Raises:
        ConfigError: its configuration cannot be read.
        DataError: its metrics are missing, end before the last step, are not those of one run of so many steps or have
            a value that a summary may not have, or a file of its responses cannot be read.
    """
    rows = read_metrics(run_dir / METRICS_FILE)
    _check_steps([row["step"] for row in rows], run_dir, num_steps=planned.config.num_steps)
    curves = {name: [(row["step"], row[name]) for row in rows if row.get(name) is not None] for name in CURVES}
    # generated rows may have given the run another threshold than was planned
    groups = all_groups(run_dir, threshold=load_config(run_dir / CONFIG_FILE).algorithm.success_threshold)
    summary = FinishedRun(
        arm=planned.arm.name,
        seed=planned.seed,
        num_steps=planned.config.num_steps,
        fingerprint=fingerprint(planned.config),
        config=portable(to_plain(planned.config)),
        provenance=logged_provenance(run_dir / LOG_FILE),
        curves={name: points for name, points in curves.items() if points},
        cost={name: sum(row.get(part) or 0.0 for row in rows for part in parts) for name, parts in _SUMS.items()},
        kinds={
            one.kind: {"share": one.share, "entropy": one.entropy, **{side: one.credit[side] for side in SIDES}}
            for one in kinds_of_tokens(groups)
        },
    )
    try:
        _check_numbers(summary)
    except DataError as error:
        raise DataError(f"{run_dir}: {error}; {_ANEW}") from error
    return summary


def _check_steps(steps: Sequence[int], run_dir: Path, *, num_steps: int) -> None:
    last = max(steps, default=0)
    if last < num_steps:
        raise DataError(f"{run_dir}: its metrics end at step {last} of {num_steps}; it has not finished")
    if last > num_steps:
        raise DataError(f"{run_dir}: its metrics go on to step {last}, and the run is planned for {num_steps}; {_ANEW}")
    for before, step in pairwise(steps):
        if step <= before:
            raise DataError(f"{run_dir}: its metrics have step {step} after step {before}, so not of one run; {_ANEW}")


def check_run(found: FinishedRun) -> None:
    """Checks a summary that was read.

    Raises:
        DataError: it contradicts itself, or has a value that a summary may not have.
    """
    if not 0 <= found.seed <= MAX_SEED:
        raise DataError(f"seed is {found.seed}, expected 0 to {MAX_SEED}")
    if (now := digest(found.config)) != found.fingerprint:
        raise DataError(f"its config was changed: fingerprint {now}, {printable(found.fingerprint)} is written there")
    if found.config.get("num_steps") != found.num_steps:
        raise DataError(f"num_steps is {found.num_steps}, and that of its config is another")
    _check_numbers(found)


def _check_numbers(found: FinishedRun) -> None:
    values = [value for points in found.curves.values() for _, value in points]
    values += [value for kind in found.kinds.values() for value in kind.values() if value is not None]
    if not all(abs(value) <= MAX_VALUE for value in (*values, *found.cost.values())):
        raise DataError(f"a value is not between -{MAX_VALUE:g} and {MAX_VALUE:g}")
    for name, points in found.curves.items():
        steps = [step for step, _ in points]
        if not steps or steps != sorted(set(steps)) or steps[0] < 0 or steps[-1] > found.num_steps:
            raise DataError(f"{printable(name)}: its steps do not ascend from at least 0 to at most {found.num_steps}")
    if found.cost.keys() != _SUMS.keys() or min(found.cost.values()) < 0:
        raise DataError(f"cost must have {', '.join(_SUMS)}, none of them negative")


def of_arm(summaries: Sequence[FinishedRun], arm: str) -> dict[int, FinishedRun]:
    """The summaries of one arm by seed."""
    return {summary.seed: summary for summary in summaries if summary.arm == arm}


def outcomes(study: Study, summaries: Sequence[FinishedRun], arm: str) -> dict[int, float]:
    """An arm's outcomes by seed; runs that did not measure them are left out."""
    found = {
        seed: summary.at_end(study.outcome, last_steps=study.outcome_steps)
        for seed, summary in of_arm(summaries, arm).items()
    }
    return {seed: value for seed, value in found.items() if value is not None}
