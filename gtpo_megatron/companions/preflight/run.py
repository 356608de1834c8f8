"""Runs the checks: on this machine, on the processes before and after they have models, on one step; then reports."""

import logging
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from gtpo_megatron.companions.planner.hardware import GPUName
from gtpo_megatron.companions.preflight.catalogue import BEFORE_MODELS, CHECKS, WITH_MODELS
from gtpo_megatron.companions.preflight.children import in_child
from gtpo_megatron.companions.preflight.expectations import Device, expectations
from gtpo_megatron.companions.preflight.finding import Line, assessed
from gtpo_megatron.companions.preflight.memory_watch import MemoryWatch, set_phase, start_smi
from gtpo_megatron.companions.preflight.probes import devices
from gtpo_megatron.companions.preflight.probes.trainer import answers
from gtpo_megatron.companions.preflight.report import Report, shown_line, write_json, write_page
from gtpo_megatron.companions.preflight.room import Room
from gtpo_megatron.companions.preflight.runner import Budget, CheckRunner, chosen_checks
from gtpo_megatron.config.own_reward import run_with_own_reward
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.errors import ConfigError, GTPOError
from gtpo_megatron.mismatch.gate import MismatchGate
from gtpo_megatron.observability.logs import set_up_logs
from gtpo_megatron.observability.timers import StageTimers
from gtpo_megatron.orchestration.gguf_model import with_model_folder
from gtpo_megatron.orchestration.in_process import local_stages
from gtpo_megatron.orchestration.on_ray.run import ray_stages
from gtpo_megatron.orchestration.stages.inspection import Inspector, Machines, Relink
from gtpo_megatron.orchestration.stages.stages import Stages
from gtpo_megatron.rollout.engine_checks import is_cpu_build
from gtpo_megatron.run_folder.provenance import log_provenance
from gtpo_megatron.weights.architecture import read_architecture

logger = logging.getLogger(__name__)

JSON_FILE, PAGE_FILE = "preflight.json", "preflight.html"

START_SHARE = 0.4
"""Of the whole time that the processes may take to start."""

STAGE_SHARE = 0.4
"""Of the whole time that one stage of a step may take."""

SILENT = Console(quiet=True, force_terminal=True)
"""For log lines: ``log.txt`` has them, and the terminal has one line a finding."""

DEVICES_S = 180.0
"""In which a child has imported torch from a slow disk, and made a context on its GPUs."""

PING_S = 15.0
"""In which a process answers that is not busy with a call that hangs."""


class _EnoughError(Exception):
    """No check is left that needs models: the start ends before they are loaded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightOptions:
    """Choice of the checks, and limits on all of them.

    Attributes:
        output: folder of the report, on the disk of the run.
        only: names of checks; empty: all.
        skip: names of checks.
        seconds: for all of it.
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
        config: of the recipe.
        options: what to check.
        console: one line a finding.

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
    began = datetime.now(UTC)
    room = _room(config, options, chosen, console)
    try:
        _run(room)
    except KeyboardInterrupt:  # what was found is kept
        room.runner.give_up_rest("interrupted")
        _report(room, options, began)
        raise
    return _report(room, options, began)


def _report(room: Room, options: PreflightOptions, began: datetime) -> Report:
    """Writes the report of what was found."""
    report = Report(
        recipe=room.config.name,
        began=began.isoformat(timespec="seconds"),
        seconds=options.seconds - room.runner.budget.left_s,
        layout=str(room.config.parallel),
        gpus=sorted({device.name for found in room.devices.values() for device in found}),
        lines=tuple(room.runner.lines),
    )
    write_json(options.output / JSON_FILE, report)
    write_page(options.output / PAGE_FILE, report)
    return report


def _room(config: RunConfig, options: PreflightOptions, chosen: frozenset[str], console: Console) -> Room:
    cluster = replace(
        config.cluster,
        start_deadline_s=min(config.cluster.start_deadline_s, START_SHARE * options.seconds),
        stage_deadline_s=min(config.cluster.stage_deadline_s, STAGE_SHARE * options.seconds),
    )
    config = run_with_own_reward(replace(config, cluster=cluster))

    def show(line: Line) -> None:
        console.print(shown_line(line), highlight=False, soft_wrap=True)

    def is_alive() -> bool:
        if room.machines is None or room.stages is None:
            return True  # nothing has been lost that a later check could miss
        try:
            room.machines.run(
                answers, dict.fromkeys((*room.machines.ranks, *room.machines.engines), ()), deadline_s=PING_S
            )
        except GTPOError as error:
            logger.warning("the processes do not answer any more: %s", error)
            return False
        return True

    has_experts = False
    try:
        has_experts = read_architecture(Path(config.model.path)).experts is not None
    except ConfigError as error:  # the check ``inputs`` says so
        logger.warning("the model folder cannot be read: %s", error)
    room = Room(
        config=config,
        output=options.output,
        gpu=options.gpu,
        runner=CheckRunner(CHECKS, chosen, Budget(options.seconds), show=show, is_alive=is_alive),
        memory=MemoryWatch(),
        gate=MismatchGate.of_run(config, has_experts=has_experts),
    )
    return room


def _run(room: Room) -> None:
    """All checks, with the processes around those that need them."""
    runner = room.runner
    runner.run("inputs", room)
    if not runner.wants([*BEFORE_MODELS, "start", *WITH_MODELS, "end"]):
        return
    inspector = _Inspection(room)
    config = room.config
    timers = StageTimers()
    began = time.monotonic()
    has_started = False
    try:
        with _stages(config, room.output, timers, inspector) as stages:
            has_started = True
            _started(room, stages, seconds=time.monotonic() - began - inspector.seconds)
            for name in WITH_MODELS:
                runner.run(name, room)
    except _EnoughError:
        return
    except Exception as error:  # any: the report says what was found before
        logger.warning("the run's processes failed", exc_info=True)
        runner.fail("end" if has_started else "start", error, seconds=time.monotonic() - began)
        if not has_started:
            runner.give_up(inspector.missing(), "the processes did not start")
        return
    runner.run("end", room)


def _stages(
    config: RunConfig, folder: Path, timers: StageTimers, inspector: Inspector
) -> AbstractContextManager[Stages]:
    """Opens the stages of a step in the way ``train`` does."""
    if config.cluster.mode == "ray":
        return ray_stages(config, folder, timers, inspector=inspector)
    return local_stages(config, folder, timers, inspector=inspector)


def _started(room: Room, stages: Stages, *, seconds: float) -> None:
    room.stages = stages
    limit = room.config.cluster.start_deadline_s
    room.runner.note(
        "start",
        assessed(
            "ranks, engines and rewards",
            f"up in {seconds:.0f} s",
            is_good=True,
            expected=f"within {limit:.0f} s",
            remedy="",
            figures={"seconds": seconds},
        ),
        seconds=seconds,
    )


class _Inspection(Inspector):
    """Makes the checks of machines as soon as there are processes on them.

    Args:
        room: filled with processes, devices, expectations and the link.

    Attributes:
        seconds: that these checks have taken.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._has_looked = False
        self.seconds = 0.0

    def processes_are_up(self, machines: Machines) -> None:
        """Looks at the machines.

        Raises:
            _EnoughError: nothing else is to be looked at.
        """
        room, began = self._room, time.monotonic()
        room.machines = machines
        room.devices = _devices(room)
        per_node = _most_on_a_node(room)
        of_ranks = [device for name in machines.ranks for device in room.devices.get(name, ())]
        room.expected = expectations(room.config, of_ranks, gpu=room.gpu, per_node=per_node)
        for name in BEFORE_MODELS:
            room.runner.run(name, room)
        self._has_looked = True
        if not (room.runner.wants(["start"]) and room.runner.can("start")):
            for name in ("start", *WITH_MODELS, "end"):
                room.runner.run(name, room)  # each that was chosen says why it is not run
            raise _EnoughError
        if room.expected.has_gpus:
            nodes = room.one_per_host()
            if all(room.ask(nodes, start_smi).values()):
                room.memory.watch_devices(lambda phase: room.ask(nodes, set_phase, phase))
        else:
            room.memory.watch_host()
        self.seconds = time.monotonic() - began

    def link_is_open(self, relink: Relink) -> None:
        """Keeps the way to other transports."""
        self._room.relink = relink

    def missing(self) -> list[str]:
        """Checks that were not reached."""
        return [*(() if self._has_looked else BEFORE_MODELS), *WITH_MODELS]


def _devices(room: Room) -> dict[str, tuple[Device, ...]]:
    """GPUs of every process that has some of its own, or shares those of its ranks."""
    machines = room.processes
    if is_cpu_build():
        return {}
    names = machines.ranks
    if room.config.rollout.placement != "colocated":
        names = (*names, *machines.engines)
    found = room.ask(names, in_child, f"{devices.__name__}:visible", {}, DEVICES_S)
    return {name: tuple(Device(**device) for device in answer) for name, answer in found.items()}


def _most_on_a_node(room: Room) -> int:
    """GPUs of the node with the most, by what processes see."""
    by_host: dict[str, int] = {}
    for name, found in room.devices.items():
        host = room.processes.hosts[name]
        by_host[host] = by_host.get(host, 0) + len(found)
    return max(by_host.values(), default=0)
