"""``gtpo-megatron status``."""

import json
import math
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import tyro

from gtpo_megatron.cli.arguments import parse_options
from gtpo_megatron.cli.command import Command
from gtpo_megatron.companions.health.history import Finding, Level, worst
from gtpo_megatron.companions.health.signs import assess, in_one_line
from gtpo_megatron.companions.status import RunStatus, read_status
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.observability.timers import duration
from gtpo_megatron.run_folder.metrics_file import finite

FULL_BYTES = 16 << 20
"""A disk with less free space counts as full."""

FAILED_STATES = ("failed", "gone")
"""States that make the command's status 1, so that a script can watch a run."""

EXIT_AMBER, EXIT_RED = 3, 4
"""Status of a run that goes on with a sign that is not green; the first with ``--strict`` only."""


@configuration
class StatusOptions:
    """Options of ``status``.

    Attributes:
        run: folder of the run.
        json: print everything as one JSON object.
        strict: an amber sign is worth an exit status too.
    """

    run: Annotated[str, tyro.conf.Positional]
    json: bool = False
    strict: bool = False


def run(arguments: Sequence[str]) -> int:
    """``status RUN``; 1 for a run that failed or vanished, 4 for a red sign, 3 for an amber one with ``--strict``."""
    options = parse_options(StatusOptions, arguments, program="gtpo-megatron status")
    status = read_status(Path(options.run))
    findings = assess(status.rows, status.num_problems)
    if options.json:
        sys.stdout.write(json.dumps(_plain(status, findings), indent=1) + "\n")
    else:
        sys.stdout.write("\n".join(f"{label:<11} {text}" for label, text in screen(status)) + "\n")
    if status.state in FAILED_STATES:
        return 1
    exits = {Level.RED: EXIT_RED, Level.AMBER: EXIT_AMBER if options.strict else 0}
    return exits.get(worst(findings), 0)


def _health(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    """One line for all green signs, one for each other with its rule."""
    if not findings:
        return [("health", in_one_line(findings))]
    bad = [finding for finding in findings if finding.level > Level.GREEN]
    counted = f"{len(findings) - len(bad)} of {len(findings)} signs are green" if bad else in_one_line(findings)
    return [("health", counted)] + [
        (f"  {finding.level.word}", f"{finding.sign}: {finding.seen} ({finding.rule})") for finding in bad
    ]


def _plain(status: RunStatus, findings: Sequence[Finding]) -> dict[str, Any]:
    """Plain values for a script; of the metrics the last step's."""
    skipped = {"rows", "last_row", "folder"}
    plain = {field.name: getattr(status, field.name) for field in fields(status) if field.name not in skipped}
    plain["driver"] = None if status.driver is None else asdict(status.driver)
    plain["accuracies"] = [asdict(accuracy) for accuracy in status.accuracies]
    health = [asdict(finding) | {"level": finding.level.word} for finding in findings]
    return {
        **plain,
        "folder": str(status.folder),
        "seconds_left": status.seconds_left,
        "last_row": {name: value for name, value in status.last_row.items() if finite(value) is not None},
        "health": {"level": worst(findings).word if findings else None, "signs": health},
    }


def screen(status: RunStatus) -> list[tuple[str, str]]:
    """The lines to print, as label and text."""
    lines = [("run", f"{status.name}   {status.folder}"), ("state", _state(status))]
    progress = f"{status.step} of {status.num_steps} ({100 * status.step / status.num_steps:.0f}%)"
    if status.step_s is not None:
        progress += f", {duration(status.step_s)} a step"
    if status.seconds_left is not None:
        progress += f", about {duration(status.seconds_left)} left"
    lines.append(("step", progress))
    if status.last_row_age_s is not None:
        lines.append(("last row", f"{duration(status.last_row_age_s)} ago: {_numbers(status)}"))
    for found in status.accuracies:
        since = "" if found.before is None else f" (before training {100 * found.before:.1f}%)"
        lines.append((found.label, f"{100 * found.value:.1f}% after step {found.step}{since}"))
    lines.append(("checkpoint", _checkpoint(status)))
    if status.num_errors:
        lines.append(("errors", f"{status.num_errors} in log.txt since the last start; the last: {status.last_error}"))
    else:
        others = " besides that of its end" if status.state == "failed" else ""
        lines.append(("errors", f"none in log.txt since the last start{others}"))
    lines += _health(assess(status.rows, status.num_problems))
    return lines + [("remark", remark) for remark in status.remarks]


def _state(status: RunStatus) -> str:
    driver = status.driver
    if driver is None:
        return status.state
    restarts = f", restarts: {driver.num_starts - 1}" if driver.num_starts > 1 else ""
    where = f"process {driver.pid} on {driver.host}"
    if status.state in ("running", "silent"):
        waiting = "" if status.state == "running" else " - no step for long; is a process hung?"
        return f"{status.state} since {_when(driver.started_at)}, {where}{restarts}{waiting}"
    if status.state == "gone":
        free = shutil.disk_usage(status.folder).free
        why = "killed?" if free > FULL_BYTES else f"killed, or its disk was full: {free / 2**20:.1f} MiB are free"
        return f"gone: {where} ended without a word ({why}); --resume goes on{restarts}"
    ended = {"finished": "finished", "stopped": driver.outcome}.get(status.state, f"failed: {driver.outcome}")
    hint = "" if status.state == "finished" else "; --resume goes on"
    return f"{ended} ({_when(driver.ended_at)}, {where}){hint}{restarts}"


def _numbers(status: RunStatus) -> str:
    shown = (
        ("reward", "rollout/reward_mean", "{:.3f}"),
        ("entropy", "policy/entropy_nats", "{:.3f} nats"),
        ("length", "rollout/response_length_tokens", "{:.1f} tokens"),
        ("speed", "throughput/tokens_per_s", "{:,.0f} tokens/s"),
        ("log-prob gap, p99", "sync/logprob_gap_p99", "{:.1e} nats"),
        ("its bound", "sync/logprob_gap_bound", "{:.1e} nats"),
    )
    found = [
        f"{label} {form.format(status.last_row[name])}"
        for label, name, form in shown
        if status.last_row.get(name) is not None and math.isfinite(status.last_row[name])
    ]
    return " · ".join(found) or "no step yet"


def _checkpoint(status: RunStatus) -> str:
    if status.checkpoint_step is None or status.checkpoint_age_s is None:
        return "none yet"
    behind = status.step - status.checkpoint_step
    late = f", {behind} steps behind" if behind > 0 else ""
    return f"step_{status.checkpoint_step}, {duration(status.checkpoint_age_s)} old{late}"


def _when(moment: float) -> str:
    there = datetime.fromtimestamp(moment).astimezone()
    return there.strftime("%H:%M:%S" if time.time() - moment < 12 * 3600 else "%Y-%m-%d %H:%M")


COMMAND = Command(
    usage="  status RUN        says where a run stands, from its folder",
    run=run,
    options=StatusOptions,
)
