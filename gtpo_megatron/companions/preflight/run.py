"""Runs the checks: on this machine, on the processes before and after they have models, on one step; then reports."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from gtpo_megatron import __version__
from gtpo_megatron.companions.planner.hardware import GPUName
from gtpo_megatron.companions.preflight.catalogue import BEFORE_MODELS, CHECKS, WITH_MODELS
from gtpo_megatron.companions.preflight.children import in_child
from gtpo_megatron.companions.preflight.context import PreflightContext, StepContext
from gtpo_megatron.companions.preflight.expectations import Device, expectations
from gtpo_megatron.companions.preflight.gpu_handover import GpuHandover
from gtpo_megatron.companions.preflight.memory_watch import MemoryWatch, set_phase, start_smi
from gtpo_megatron.companions.preflight.page import Report, plain, write_json, write_page
from gtpo_megatron.companions.preflight.probes import devices
from gtpo_megatron.companions.preflight.probes.system import is_there
from gtpo_megatron.companions.preflight.result import CheckResult, Status, assessed
from gtpo_megatron.companions.preflight.runner import CheckRunner, chosen_checks
from gtpo_megatron.config.default_reward import run_with_default_reward
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.errors import ConfigError, GTPOError
from gtpo_megatron.observability.logs import set_up_logs
from gtpo_megatron.observability.timers import StageTimers
from gtpo_megatron.orchestration.in_process import local_stages
from gtpo_megatron.orchestration.model_folder import with_model_folder
from gtpo_megatron.orchestration.on_ray.run import ray_stages
from gtpo_megatron.orchestration.stages.processes import RunProcesses
from gtpo_megatron.rollout.engine_checks import is_cpu_build
from gtpo_megatron.run_folder.provenance import log_provenance

logger = logging.getLogger(__name__)

JSON_FILE, PAGE_FILE = "preflight.json", "preflight.html"

START_SHARE = 0.4
"""Of the whole time that the processes may take to start."""

STAGE_SHARE = 0.4
"""Of the whole time that one stage of a step may take."""

SILENT = Console(quiet=True, force_terminal=True)
"""For log lines: ``log.txt`` has them, and the terminal has one line a result."""

DEVICES_S = 180.0
"""In which a child has imported torch from a slow disk, and made a context on its GPUs."""

PING_S = 15.0
"""In which a process answers that is not busy with a call that hangs."""

STYLES: dict[Status, str] = {
    "passed": "green",
    "failed": "bold red",
    "not run": "bold red",
    "noted": "cyan",
    "not here": "dim",
}


class _EnoughError(Exception):
    """No check is left that needs models: the start ends before they are loaded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightOptions:
    """Choice of the checks, and limits on all of them.

    Attributes:
        output: folder of the report, on the disk of the run.
        only: names of checks; empty: all.
        skip: names of checks that are left out.
        seconds: time for all of it.
        gpu: kind of GPU where its name does not say it.
    """

    output: Path
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    seconds: float = 600.0
    gpu: GPUName | None = None


def preflight(config: RunConfig, options: PreflightOptions, console: Console) -> Report:
    """Makes the checks and writes the report.

    Args:
        config: recipe.
        options: choice of the checks.
        console: one line a result.

    Raises:
        ConfigError: an option cannot be used, or the output folder cannot be written.
    """
    chosen = chosen_checks(CHECKS, only=options.only, skip=options.skip)
    if options.seconds <= 0:
        raise ConfigError(f"--seconds {options.seconds:g}: must be greater than 0")
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {options.output} cannot be written: {error.strerror}; choose another") from error
    set_up_logs(level=config.logging.log_level, run_folder=options.output, console=SILENT)
    config = with_model_folder(config)
    log_provenance(config)
    began, clock = datetime.now(UTC), time.monotonic()
    run = Preflight(config, options, chosen, show=lambda result: show(console, result))
    try:
        run.make_checks()
    except KeyboardInterrupt:  # what was measured is reported
        run.runner.give_up_rest("interrupted")
        raise
    finally:
        report = Report(
            command="preflight",
            title=config.name,
            began=began.isoformat(timespec="seconds"),
            seconds=time.monotonic() - clock,
            facts={
                "layout": str(config.parallel),
                "gpus": sorted({device.name for each in run.context.devices.values() for device in each}),
            },
            results=run.runner.results,
        )
        write_report(report, options.output)
    return report


def write_report(report: Report, folder: Path) -> None:
    """Writes ``preflight.json`` and ``preflight.html``."""
    content = {
        "recipe": report.title,
        "began": report.began,
        "seconds": round(report.seconds, 1),
        "package": __version__,
        **report.facts,
        "passed": report.has_passed,
        "summary": report.summary,
        "lines": [plain(result) for result in report.results],
    }
    write_json(folder / JSON_FILE, content)
    write_page(folder / PAGE_FILE, report)


def show(console: Console, result: CheckResult) -> None:
    """One line for a terminal; a failure has a second one with what to do."""
    style = STYLES[result.status]
    text = f"[{style}]{result.status:<8}[/] {result.check:<12} {escape(result.what)}: {escape(result.measured)}"
    if result.expected:
        text += f" [dim]({escape(result.expected)})[/]"
    if result.remedy:
        text += f"\n{'':<22}[bold]what to do:[/] {escape(result.remedy)}"
    console.print(text, highlight=False, soft_wrap=True)


class Preflight:
    """The checks of one recipe, with the processes around those that need them.

    Args:
        config: recipe.
        options: choices of the user.
        chosen: names of the checks to make.
        show: called with every result.

    Attributes:
        runner: runner with the results so far.
        context: argument of the checks so far.
    """

    def __init__(
        self,
        config: RunConfig,
        options: PreflightOptions,
        chosen: frozenset[str],
        *,
        show: Callable[[CheckResult], None],
    ) -> None:
        self.runner = CheckRunner(CHECKS, chosen, options.seconds, show=show, is_alive=self._is_alive)
        cluster = replace(
            config.cluster,
            start_deadline_s=min(config.cluster.start_deadline_s, START_SHARE * options.seconds),
            stage_deadline_s=min(config.cluster.stage_deadline_s, STAGE_SHARE * options.seconds),
        )
        self.context = PreflightContext(
            config=run_with_default_reward(replace(config, cluster=cluster)),
            output=options.output,
            seconds=options.seconds,
            seconds_left=self.runner.seconds_left,
            values=self.runner.values,
            processes=RunProcesses(ranks=(), engines=(), hosts={}, call=lambda *_: {}),
        )
        self._gpu, self._memory = options.gpu, MemoryWatch()
        self._machines_s: float | None = None

    def make_checks(self) -> None:
        """Makes all checks that were chosen."""
        runner = self.runner
        runner.run("inputs", self.context)
        if not runner.wants([*BEFORE_MODELS, "start", *WITH_MODELS, "end"]):
            return
        config, began, has_started = self.context.config, time.monotonic(), False
        make_stages = ray_stages if config.cluster.mode == "ray" else local_stages
        try:
            with make_stages(config, self.context.output, StageTimers(), on_processes=self.check_machines) as stages:
                has_started = True
                seconds = time.monotonic() - began - (self._machines_s or 0.0)
                runner.add("start", _started(seconds, config.cluster.start_deadline_s), seconds=seconds)
                gpus = GpuHandover(stages, self._memory)
                self.context = context = StepContext(
                    **vars(self.context), stages=stages, memory=self._memory, gpus=gpus
                )
                for name in WITH_MODELS:
                    runner.run(name, context)
        except _EnoughError:
            return
        except Exception as error:  # any: the report says what was measured before
            logger.warning("the run's processes failed", exc_info=True)
            runner.fail("end" if has_started else "start", error, seconds=time.monotonic() - began)
            if not has_started:
                missing = [*(() if self._machines_s is not None else BEFORE_MODELS), *WITH_MODELS]
                runner.give_up(missing, "the processes did not start")
            return
        runner.run("end", self.context)

    def check_machines(self, processes: RunProcesses) -> None:
        """Makes the checks of machines as soon as there are processes on them.

        Raises:
            _EnoughError: nothing else is to be checked.
        """
        runner, began = self.runner, time.monotonic()
        self.context = context = self._with_processes(processes)
        for name in BEFORE_MODELS:
            runner.run(name, context)
        self._machines_s = time.monotonic() - began
        if not (runner.wants(["start"]) and runner.can("start")):
            for name in ("start", *WITH_MODELS, "end"):
                runner.run(name, context)  # each that was chosen says why it is not run
            raise _EnoughError
        if context.has_gpus:
            nodes = context.one_per_host
            if all(context.ask(nodes, start_smi).values()):
                self._memory.watch_devices(lambda phase: context.ask(nodes, set_phase, phase))
        else:
            self._memory.watch_host()
        self._machines_s = time.monotonic() - began

    def _with_processes(self, processes: RunProcesses) -> PreflightContext:
        """The context with the processes, their GPUs, and what is expected of these."""
        context = replace(self.context, processes=processes)
        if is_cpu_build():
            return context
        names = processes.ranks
        if context.config.rollout.placement != "colocated":  # else they share those of the ranks
            names = (*names, *processes.engines)
        answers = context.ask(names, in_child, f"{devices.__name__}:visible", {}, DEVICES_S)
        found = {name: tuple(Device(**device) for device in answer) for name, answer in answers.items()}
        per_node: dict[str, int] = {}
        for name, each in found.items():
            per_node[processes.hosts[name]] = per_node.get(processes.hosts[name], 0) + len(each)
        expected = expectations(
            context.config,
            [device for name in processes.ranks for device in found[name]],
            gpu=self._gpu,
            per_node=max(per_node.values(), default=0),
        )
        return replace(context, devices=found, expected=expected)

    def _is_alive(self) -> bool:
        """Whether the processes answer; before they have models nothing has been lost that a later check could miss."""
        if not isinstance(self.context, StepContext):
            return True
        processes = self.context.processes
        try:
            processes.run(is_there, dict.fromkeys((*processes.ranks, *processes.engines), ()), deadline_s=PING_S)
        except GTPOError as error:
            logger.warning("the processes do not answer any more: %s", error)
            return False
        return True


def _started(seconds: float, limit_s: float) -> CheckResult:
    return assessed(
        "ranks, engines and rewards",
        f"up in {seconds:.0f} s",
        is_good=True,
        expected=f"within {limit_s:.0f} s",
        remedy="",
        figures={"seconds": seconds},
    )
