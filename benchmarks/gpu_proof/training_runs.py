"""Runs of ``gtpo-megatron train`` as children: started, killed, resumed; and what their files say."""

import contextlib
import importlib.util
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import eager_vllm
from benchmarks.gpu_proof.report import Section
from gtpo_megatron.companions.training_process import TrainingProcess
from gtpo_megatron.run_folder.metrics_file import METRICS_FILE, read_metrics
from gtpo_megatron.run_folder.provenance import LOG_FILE

CURVES = {
    "rollout/reward_mean": "reward",
    "policy/entropy_nats": "entropy",
    "optimizer/grad_norm": "gradient norm",
    "sync/logprob_gap_mean": "log-prob gap",
}

STAGES = {
    "timing/step_s": ("a step", "s"),
    "timing/rollout_s": ("generate", "s"),
    "timing/score_s": ("score", "s"),
    "timing/update_s": ("train", "s"),
    "timing/weight_sync_s": ("push", "s"),
    "timing/to_trainer_s": ("engine falls asleep, the trainer's state comes back from the host", "s"),
    "timing/to_push_s": ("the state goes to the host, the engine's weights wake", "s"),
    "timing/to_engine_s": ("its cache wakes", "s"),
    "throughput/tokens_per_s": ("response tokens", "tokens/s"),
}
"""Figure and unit by metric."""

LOG_CHARACTERS = 6000
"""Of the end of a log, in what is kept of a run that failed."""

POLL_S = 0.2

GAPS = ("p50", "p99", "mean", "scaled")

Rows = list[dict[str, Any]]


def lacking(device: torch.device) -> str:
    """What an engine needs and is not here; empty if nothing."""
    if absent := [name for name in ("vllm", "ray") if importlib.util.find_spec(name) is None]:
        return f"{' and '.join(absent)} not installed"
    if device.type == "cpu" and torch.version.cuda is not None:
        return "torch and vLLM here are built for GPUs: an engine cannot run on a CPU"
    return ""


class Run:
    """One run folder, and the commands that make it.

    Args:
        section: takes the command, and a failed run's log.
        folder: run folder; its configuration and output lie beside it.
        recipe: ``module:function`` and options, as on a command line.
        until: value of ``time.monotonic`` when the last command must have ended.
    """

    def __init__(self, section: Section, folder: Path, recipe: Sequence[str], *, until: float) -> None:
        self._section, self._until = section, until
        self.folder = folder
        self._config, self._output = folder.with_suffix(".yaml"), folder.with_suffix(".out")
        section.figure("command", f"gtpo-megatron train {shlex.join(recipe)}")
        self._config.write_text(printed("config", *recipe), encoding="utf-8")

    def train(self, *, resume: bool = False, killed_after: int | None = None) -> None:
        """Trains to the end, or until a step is done, after which everything is killed.

        Raises:
            WorkerError: it failed.
            TimeoutError: there was no time left.
        """
        began = time.monotonic()
        process = TrainingProcess(self._config, self.folder, output=self._output, resume=resume)
        first = last = process.last_step if resume else -1
        try:
            while process.wait_until(time.monotonic() + POLL_S) == "running":
                if process.last_step > last == first:
                    name = "until its first row after the kill" if resume else "until its first row"
                    self._section.figure(name, time.monotonic() - began, "s")
                last = process.last_step
                if killed_after is not None and last >= killed_after:
                    break
                if time.monotonic() > self._until:
                    raise TimeoutError(f"the run was at step {last} when its time was up")
            else:
                if killed_after is not None:
                    raise RuntimeError(f"the run ended before step {killed_after}, after which it was to be killed")
        except Exception:
            self._section.logs |= {name: _end(path) for name, path in self._logs()}
            raise
        finally:
            process.kill()
        self._section.figure("killed" if killed_after is not None else "ended", time.monotonic() - began, "s")

    def _logs(self) -> Iterator[tuple[str, Path]]:
        yield "output", self._output
        yield LOG_FILE, self.folder / LOG_FILE

    def rows(self) -> Rows:
        """Of its metrics, a step each; none before the first."""
        file = self.folder / METRICS_FILE
        return read_metrics(file) if file.exists() else []


def printed(*command: str) -> str:
    """What a command of ``gtpo-megatron`` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "gtpo_megatron.cli", *command], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"gtpo-megatron {shlex.join(command)}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def _end(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")[-LOG_CHARACTERS:] if path.exists() else ""


def values(rows: Rows, name: str, *, after: int = 0) -> list[float]:
    """One metric of the steps after the first ones, where it is there."""
    return [row[name] for row in rows if row["step"] > after and row.get(name) is not None]


def learning(section: Section, rows: Rows, on_cpu: dict[str, float]) -> None:
    """The curve of a run, beside what another reached before and after on two cores.

    Args:
        section: takes it.
        rows: metrics of the run.
        on_cpu: held-out accuracy by ``before`` and ``after``.
    """
    heldout = [(row["step"], row["eval/heldout_mean_at_k"]) for row in rows if "eval/heldout_mean_at_k" in row]
    for name, found in {"before": heldout[:1], "after": heldout[1:][-1:]}.items():
        for step, accuracy in found:
            section.figure(f"held-out accuracy {name}, at step {step}", accuracy, cpu=on_cpu[name])
    section.figure("held-out accuracy by step", " ".join(f"{step}:{accuracy:.3f}" for step, accuracy in heldout))
    for metric, name in CURVES.items():
        section.figure(f"{name} by step", " ".join(f"{value:.3g}" for value in values(rows, metric)))


def typical(section: Section, rows: Rows, names: dict[str, tuple[str, str]], *, after: int, **beside: float) -> None:
    """Medians of metrics.

    Args:
        section: takes them.
        rows: metrics of the run.
        names: figure and unit by metric.
        after: so many steps are not counted: they compile, or fill caches.
        **beside: what to compare with, by metric.
    """
    for metric, (name, unit) in names.items():
        if found := values(rows, metric, after=after):
            planned = {"planned": beside[metric]} if metric in beside else {}
            section.figure(name, statistics.median(found), unit, **planned)


def gaps(section: Section, rows: Rows) -> None:
    """Sampler against trainer: the largest of each statistic over all steps, beside what the run allows."""
    for name in GAPS:
        if found := values(rows, f"sync/logprob_gap_{name}"):
            limit = values(rows, f"sync/logprob_gap_{name}_limit")
            allowed = {"limit": limit[0]} if limit else {}
            section.figure(f"log-prob gap, {name}: largest of {len(found)} steps", max(found), "nats", **allowed)


@contextlib.contextmanager
def eager_engines(folder: Path) -> Iterator[None]:
    """Engines that are started meanwhile compile nothing and capture no graphs."""
    before = os.environ.get("PYTHONPATH")
    eager_vllm.install(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [before])])
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
