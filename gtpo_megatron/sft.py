"""``gtpo-megatron sft``: checks all inputs, starts the ranks, trains on given conversations, exports."""

import logging
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from gtpo_megatron.checks import PlannedRun, run_checks
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.config.serialize import load_any, to_plain
from gtpo_megatron.config.sft import SftConfig
from gtpo_megatron.data.prompt_sampler import PromptSampler
from gtpo_megatron.observability.known_warnings import FILE_ONLY
from gtpo_megatron.observability.progress import TrainingDisplay
from gtpo_megatron.observability.sinks import open_sinks
from gtpo_megatron.observability.timers import StageTimers
from gtpo_megatron.orchestration.loop.disk_space import check_disk_space
from gtpo_megatron.orchestration.loop.sft_inputs import SftInputs, read_sft_inputs
from gtpo_megatron.orchestration.loop.supervised import SftSummary, SupervisedLoop
from gtpo_megatron.orchestration.machine_record import record_machines
from gtpo_megatron.orchestration.model_folder import with_model_folder
from gtpo_megatron.orchestration.pinned_data import pin_conversations
from gtpo_megatron.orchestration.stages.trainer import Trainer
from gtpo_megatron.run_folder.folder import CONFIG_FILE, RunFolder
from gtpo_megatron.run_folder.manifest import run_facts
from gtpo_megatron.run_folder.metrics_file import METRICS_FILE, check_metrics
from gtpo_megatron.run_folder.resume_notes import resume_notes
from gtpo_megatron.run_folder.stop_request import StopAtOnce
from gtpo_megatron.train import export, opened_run, outcome, started_with
from gtpo_megatron.weights.config_json import read_architecture

logger = logging.getLogger(__name__)


def sft(config: SftConfig, *, run_dir: Path, resume: bool, console: Console) -> SftSummary:
    """Trains on given conversations to the last step.

    Args:
        config: configuration of the warm start.
        run_dir: its folder; created if it does not exist.
        resume: resume from the folder's last checkpoint, or start if it has none.
        console: the terminal.

    Returns:
        The held-out loss before and after; or the step at which it was asked to stop.

    Raises:
        GTPOError: configuration, data or model cannot be used, raised before any process starts; or a stage failed. The
            last checkpoint stays valid.
    """
    config, inputs = pinned_inputs(config, run_dir / CONFIG_FILE if resume else None, resume=resume)
    of_ranks = config.of_ranks()
    with opened_run(config, run_dir, resume=resume, console=console) as (folder, ending, stop), ExitStack() as stack:
        architecture = read_architecture(Path(config.model.path))
        facts = run_facts(config, architecture)
        check_disk_space(of_ranks, architecture, run_dir, used_bytes=folder.checkpoints.num_bytes)
        checkpoint = folder.checkpoints.latest(config.checkpoint.verify) if resume else None
        first = checkpoint.state.step if checkpoint else 0
        notes = (*inputs.notes, *(resume_notes(checkpoint, facts, folder) if resume else ()))
        if checkpoint:
            PromptSampler(inputs.train, config.seed).load_state_dict(checkpoint.state.sampler)
            check_metrics(run_dir / METRICS_FILE)
        folder.record_run(config, inputs.contents, goes_on=checkpoint is not None)
        # rows that an earlier start left, measured before its first step, give way to this run's
        starts_again = resume or (run_dir / METRICS_FILE).exists()
        last_row = checkpoint.last_row if checkpoint else (-1 if starts_again else None)
        sinks = stack.enter_context(open_sinks(run_dir, config.logging, run_config=to_plain(config), last_row=last_row))
        display = stack.enter_context(
            TrainingDisplay(
                num_steps=config.num_steps, title=config.name, first_step=first, console=console, is_supervised=True
            )
        )
        for note in notes:
            logger.info(note, extra=FILE_ONLY)
            display.note(note)
        timers = StageTimers(display.stage, on_start=display.starting)
        with ExitStack() as processes:  # which end before the export: it needs no GPU
            try:
                with stop.at_once():
                    started = started_with(of_ranks, architecture, checkpoint, resume=resume)
                    trainer = processes.enter_context(_trainer(started, run_dir, timers))
                    stop.listen()  # imported libraries may have replaced signal handlers
            except StopAtOnce:
                logger.info("asked to stop (%s) before the processes were up", stop.reason())
                summary = SftSummary(stopped_after=first, stop_reason=stop.reason())
            else:
                loop = SupervisedLoop(
                    config, folder.checkpoints, facts, inputs, trainer, timers, sinks, display, stop_reason=stop.reason
                )
                summary = loop.run(checkpoint)
        ending.outcome = outcome(summary.stopped_after, summary.stop_reason)
        if config.checkpoint.export_hf and summary.stopped_after is None:
            display.stage("export")
            export(of_ranks, folder)
            if config.adapter.is_on:
                _export_adapters(config, folder)
    return summary


def pinned_inputs(config: SftConfig, recorded: Path | None, *, resume: bool) -> tuple[SftConfig, SftInputs]:
    """The checked inputs, and the configuration with what they depend on besides: folder, commits, date, steps.

    Args:
        config: as it was asked for.
        recorded: file of the configuration of a warm start that is continued, if there is one; None: a new one.
        resume: adapters may be in a checkpoint, so that the folder that they began with need not be there.
    """
    earlier = load_any(recorded) if recorded is not None and recorded.exists() else None
    before = earlier if isinstance(earlier, SftConfig) else None
    config = pin_conversations(with_model_folder(config, earlier), before)
    planned = PlannedRun.of_run(config.of_ranks(), resume=resume)
    run_checks(planned, samples=False)
    inputs = read_sft_inputs(config, planned.tokenizer, vocab_size=planned.architecture.vocab_size)
    config = config.with_steps(len(inputs.train))
    return replace(config, data=replace(config.data, template_date=inputs.template_date)), inputs


def _export_adapters(config: SftConfig, folder: RunFolder) -> None:
    """Exports the adapters of the last checkpoint in peft's format, from which a run can begin."""
    from gtpo_megatron.weights.conversion import megatron_to_peft

    latest = folder.checkpoints.latest(config.checkpoint.verify)
    assert latest is not None, "the last step is always saved"
    megatron_to_peft(
        latest.path, Path(config.model.path), folder.adapter_folder, replace=True, verify=config.checkpoint.verify
    )


def _trainer(config: RunConfig, run_dir: Path, timers: StageTimers) -> AbstractContextManager[Trainer]:
    """The ranks, in processes that Ray starts or in this one."""
    record = partial(record_machines, config)
    if config.cluster.mode == "ray":
        from gtpo_megatron.orchestration.on_ray.run import ray_trainer

        return ray_trainer(config, run_dir, timers, on_processes=record)
    from gtpo_megatron.orchestration.in_process import local_trainer

    return local_trainer(config, run_dir, timers, on_processes=record)
