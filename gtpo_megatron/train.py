"""``gtpo-megatron train``: checks all inputs, starts the processes, trains, exports."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from gtpo_megatron.checks import PlannedRun, run_checks
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.config.serialize import AnyConfig, load_config, to_plain
from gtpo_megatron.observability.known_warnings import FILE_ONLY
from gtpo_megatron.observability.logs import set_up_logs
from gtpo_megatron.observability.progress import TrainingDisplay
from gtpo_megatron.observability.sinks import open_sinks
from gtpo_megatron.observability.timers import StageTimers
from gtpo_megatron.orchestration.cpu_memory import check_memory
from gtpo_megatron.orchestration.loop.controller import Controller, RunSummary
from gtpo_megatron.orchestration.loop.disk_space import check_disk_space
from gtpo_megatron.orchestration.loop.inputs import RunInputs, check_enough, prompt_sampler, read_inputs
from gtpo_megatron.orchestration.machine_record import record_machines
from gtpo_megatron.orchestration.model_folder import with_model_folder
from gtpo_megatron.orchestration.on_ray.worker_servers import WorkerServers
from gtpo_megatron.orchestration.pinned_data import pin_data_sets, pin_date
from gtpo_megatron.orchestration.stages.stages import Stages
from gtpo_megatron.rollout.engine_checks import is_cpu_build
from gtpo_megatron.run_folder import state as run_state
from gtpo_megatron.run_folder.checkpoints import Checkpoint
from gtpo_megatron.run_folder.folder import CONFIG_FILE, RunFolder
from gtpo_megatron.run_folder.manifest import run_facts
from gtpo_megatron.run_folder.metrics_file import METRICS_FILE, check_metrics
from gtpo_megatron.run_folder.provenance import LOG_FILE, log_provenance, logged_cause
from gtpo_megatron.run_folder.resume_notes import resume_notes
from gtpo_megatron.run_folder.stop_request import StopAtOnce, StopRequest
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.config_json import read_architecture

logger = logging.getLogger(__name__)


def train(
    config: RunConfig, *, run_dir: Path, resume: bool, console: Console, servers: WorkerServers | None = None
) -> RunSummary:
    """Trains to the last step.

    Args:
        config: the run's configuration.
        run_dir: its folder; created if it does not exist.
        resume: resume from the folder's last checkpoint, or start if it has none.
        console: the terminal.
        servers: make the run's workers; None: each imports for itself.

    Returns:
        Held-out accuracy before and after; or the step at which the run was asked to stop.

    Raises:
        GTPOError: configuration, data or model cannot be used, raised before any process starts; or a stage failed. The
            last checkpoint stays valid.
    """
    config, inputs = _pinned_inputs(config, run_dir / CONFIG_FILE if resume else None)
    with opened_run(config, run_dir, resume=resume, console=console) as (folder, ending, stop), ExitStack() as stack:
        _log_algorithm(config)
        architecture = read_architecture(Path(config.model.path))
        facts = run_facts(config, architecture)
        if is_cpu_build() and not config.cluster.address:
            check_memory(config, architecture)
        check_disk_space(config, architecture, run_dir, used_bytes=folder.checkpoints.num_bytes)
        checkpoint = folder.checkpoints.latest(config.checkpoint.verify) if resume else None
        first = checkpoint.state.step if checkpoint else 0
        notes = (*inputs.notes, *(resume_notes(checkpoint, facts, folder) if resume else ()))
        if checkpoint:
            prompt_sampler(config, inputs).load_state_dict(checkpoint.state.sampler)
            check_metrics(run_dir / METRICS_FILE)
        folder.record_run(config, inputs.contents, goes_on=checkpoint is not None)
        # rows that an earlier start left, measured before its first step, give way to this run's
        has_rows = (run_dir / METRICS_FILE).exists()
        starts_again = resume or has_rows
        last_row = checkpoint.last_row if checkpoint else (-1 if starts_again else None)
        sinks = stack.enter_context(open_sinks(run_dir, config.logging, run_config=to_plain(config), last_row=last_row))
        display = stack.enter_context(
            TrainingDisplay(
                num_steps=config.num_steps,
                title=config.name,
                first_step=first,
                console=console,
            )
        )
        for note in notes:
            logger.info(note, extra=FILE_ONLY)
            display.note(note)
        timers = StageTimers(display.stage, on_start=display.starting)
        with ExitStack() as processes:  # which end before the export: it needs no GPU
            try:
                with stop.at_once():
                    started = started_with(config, architecture, checkpoint, resume=resume)
                    stages = processes.enter_context(_stages(started, run_dir, timers, servers))
                    stop.listen()  # imported libraries may have replaced signal handlers
            except StopAtOnce:
                logger.info("asked to stop (%s) before the processes were up", stop.reason())
                summary = RunSummary(before=None, after=None, stopped_after=first, stop_reason=stop.reason())
            else:
                controller = Controller(config, folder, facts, inputs, stages, sinks, display, stop_reason=stop.reason)
                summary = controller.run(checkpoint)
        ending.outcome = outcome(summary.stopped_after, summary.stop_reason)
        if config.checkpoint.export_hf and summary.stopped_after is None:
            display.stage("export")
            export(config, folder)
    return summary


def _pinned_inputs(config: RunConfig, recorded: Path | None) -> tuple[RunConfig, RunInputs]:
    """The checked inputs of a run, and its configuration with what they depend on besides: folder, commits, a date.

    Args:
        config: as it was asked for.
        recorded: file of the configuration of a run that is continued, if there is one; None: a new run is begun.
    """
    earlier = load_config(recorded) if recorded is not None and recorded.exists() else None
    config = pin_data_sets(with_model_folder(config, earlier), earlier)
    inputs = check_inputs(config, resume=earlier is not None, asks_network=True)
    return pin_date(config, inputs.template_date), inputs


def _stages(
    config: RunConfig, run_dir: Path, timers: StageTimers, servers: WorkerServers | None
) -> AbstractContextManager[Stages]:
    """The stages of a step, in processes that Ray starts or in this one."""
    record = partial(record_machines, config)
    if config.cluster.mode == "ray":
        from gtpo_megatron.orchestration.on_ray.run import ray_stages

        return ray_stages(config, run_dir, timers, on_processes=record, servers=servers)
    from gtpo_megatron.orchestration.in_process import local_stages

    return local_stages(config, run_dir, timers, on_processes=record)


@contextmanager
def opened_run(
    config: AnyConfig, run_dir: Path, *, resume: bool, console: Console
) -> Iterator[tuple[RunFolder, run_state.Ending, StopRequest]]:
    """A run's folder, locked and logged into; how it ends is written down, and why it fails.

    Args:
        config: checked configuration of a run or of a warm start.
        run_dir: its folder.
        resume: resume from the folder's last checkpoint.
        console: the terminal.

    Raises:
        ConfigError: another run has the folder, or it holds another one.
    """
    folder = RunFolder(run_dir)
    folder.open(config, resume=resume)
    with ExitStack() as stack:
        stack.callback(folder.close)
        stack.callback(folder.withdraw)
        set_up_logs(level=config.logging.log_level, run_folder=run_dir, console=console)
        log_provenance(config)
        ending = stack.enter_context(run_state.recorded_end(run_dir))
        stack.enter_context(logged_cause(run_dir / LOG_FILE))
        yield folder, ending, stack.enter_context(StopRequest(run_dir))


def _log_algorithm(config: RunConfig) -> None:
    from gtpo_megatron.algorithms.registry import algorithm_of  # formulas, of which a driver needs this line only
    from gtpo_megatron.config.algorithm.named import algorithm_name

    logger.info("algorithm: %s, %s", algorithm_name(type(config.algorithm)), algorithm_of(config.algorithm).about)


def export(config: RunConfig, folder: RunFolder) -> None:
    """Exports the last checkpoint in Hugging Face format, in this process."""
    from gtpo_megatron.weights.conversion import ConversionProgress, megatron_to_hf

    latest = folder.checkpoints.latest(config.checkpoint.verify)
    assert latest is not None, "the last step is always saved"
    megatron_to_hf(
        latest.path,
        Path(config.model.path),
        folder.hf_folder,
        progress=ConversionProgress(),
        replace=True,
        verify=config.checkpoint.verify,
    )


def outcome(stopped_after: int | None, reason: str) -> str:
    """How a run ended, for ``run_state.json``: at its end, or where and why it was stopped."""
    return run_state.FINISHED if stopped_after is None else f"stopped after step {stopped_after}: {reason}"


def started_with(
    config: RunConfig, architecture: Architecture, checkpoint: Checkpoint | None, *, resume: bool
) -> RunConfig:
    """What processes are started with: adapters that a checkpoint has need no folder to begin with.

    Raises:
        ConfigError: there is no checkpoint, and the folder cannot be used.
    """
    if checkpoint is not None:
        return replace(config, adapter=replace(config.adapter, path=""))
    if config.adapter.path and resume:  # a new run's are checked with its other inputs
        from gtpo_megatron.weights.peft import PeftFolder

        PeftFolder(Path(config.adapter.path), architecture, config.adapter).check_values()
    return config


def check_inputs(config: RunConfig, *, resume: bool = False, asks_network: bool = False) -> RunInputs:
    """Makes all checks of a run and reads its data sets.

    Args:
        config: of the run.
        resume: adapters may be in a checkpoint, so that the folder that they began with need not be there; and what
            only new runs are refused for is no reason to end one.
        asks_network: ask the judge, too, if there is one.

    Raises:
        ConfigError: a check of :mod:`gtpo_megatron.checks` refuses it, or there are too few problems.
        DataError: a data set is missing, empty or malformed.
    """
    planned = PlannedRun.of_run(config, resume=resume)
    run_checks(planned, asks_network=asks_network)
    inputs = read_inputs(config, planned.tokenizer, vocab_size=planned.architecture.vocab_size)
    check_enough(config.data, inputs)
    return inputs
