"""``gtpo-megatron train``: checks all inputs, starts the processes, trains, exports."""

import logging
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from gtpo_megatron.algorithms.registry import algorithm_of
from gtpo_megatron.config.algorithm.named import algorithm_name
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.config.serialize import load_config, to_plain
from gtpo_megatron.data.chat_template import check_stop_strings, load_tokenizer, stop_token_ids
from gtpo_megatron.data.prompt_sampler import PromptSampler
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.judge.client import check_judge
from gtpo_megatron.machine_memory import memory
from gtpo_megatron.observability.known_warnings import FILE_ONLY
from gtpo_megatron.observability.logs import set_up_logs
from gtpo_megatron.observability.progress import TrainingDisplay
from gtpo_megatron.observability.sinks import check_loggers, open_sinks
from gtpo_megatron.observability.timers import StageTimers
from gtpo_megatron.orchestration.cpu_memory import memory_needed
from gtpo_megatron.orchestration.gguf_model import with_model_folder
from gtpo_megatron.orchestration.host import check_free, check_host, is_cpu_build
from gtpo_megatron.orchestration.in_process import local_stages
from gtpo_megatron.orchestration.loop.controller import Controller, RunSummary
from gtpo_megatron.orchestration.loop.disk_space import check_disk_space
from gtpo_megatron.orchestration.loop.inputs import RunInputs, read_inputs
from gtpo_megatron.orchestration.machine_record import MachineRecord
from gtpo_megatron.orchestration.on_ray.run import ray_stages
from gtpo_megatron.orchestration.pinned_data import pin_data_sets, pin_date
from gtpo_megatron.rewards.function import check_threshold, run_rewards
from gtpo_megatron.rollout.conversation import check_conversation
from gtpo_megatron.run_folder import state as run_state
from gtpo_megatron.run_folder.checkpoints import Checkpoint
from gtpo_megatron.run_folder.folder import CONFIG_FILE, RunFolder
from gtpo_megatron.run_folder.manifest import RunFacts, check_model, layout_changes, run_facts
from gtpo_megatron.run_folder.metrics_file import METRICS_FILE, check_metrics, read_what_there_is
from gtpo_megatron.run_folder.provenance import LOG_FILE, log_provenance, logged_cause
from gtpo_megatron.run_folder.stop_request import StopAtOnce, StopRequest
from gtpo_megatron.sandbox.choose import check_sandbox
from gtpo_megatron.weights.adapter_shapes import check_adaptable
from gtpo_megatron.weights.architecture import Architecture, check_same_model, read_architecture
from gtpo_megatron.weights.conversion import ConversionProgress, check_weights, converted_weights, megatron_to_hf
from gtpo_megatron.weights.peft import PeftFolder

logger = logging.getLogger(__name__)


def train(config: RunConfig, *, run_dir: Path, resume: bool, console: Console) -> RunSummary:
    """Trains to the last step.

    Args:
        config: the run's configuration.
        run_dir: its folder; created if it does not exist.
        resume: resume from the folder's last checkpoint, or start if it has none.
        console: the terminal.

    Returns:
        Held-out accuracy before and after; or the step at which the run was asked to stop.

    Raises:
        GTPOError: configuration, data or model cannot be used, raised before any process starts; or a stage failed. The
            last checkpoint stays valid.
    """
    config = with_model_folder(config)
    config, inputs = _pinned_inputs(config, run_dir / CONFIG_FILE if resume else None)
    folder = RunFolder(run_dir)
    folder.open(config, resume=resume)
    with ExitStack() as stack:
        stack.callback(folder.close)
        stack.callback(folder.withdraw)
        set_up_logs(level=config.logging.log_level, run_folder=run_dir, console=console)
        log_provenance(config)
        logger.info("algorithm: %s, %s", algorithm_name(type(config.algorithm)), algorithm_of(config.algorithm).about)
        ending = stack.enter_context(run_state.recorded_end(run_dir))
        stack.enter_context(logged_cause(run_dir / LOG_FILE))
        stop = stack.enter_context(StopRequest(run_dir))
        architecture = read_architecture(Path(config.model.path))
        facts = run_facts(config, architecture)
        _check_memory(config, architecture)
        check_disk_space(config, architecture, run_dir, used_bytes=folder.checkpoints.num_bytes)
        checkpoint = folder.checkpoints.latest(config.checkpoint.verify) if resume else None
        first = checkpoint.state.step if checkpoint else 0
        notes = (*inputs.notes, *(_resume_notes(checkpoint, facts, folder) if resume else ()))
        if checkpoint:
            PromptSampler(inputs.train, config.seed).load_state_dict(checkpoint.state.sampler)
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
        make_stages = ray_stages if config.cluster.mode == "ray" else local_stages
        with ExitStack() as processes:  # which end before the export: it needs no GPU
            try:
                with stop.at_once():
                    started = _started_with(config, architecture, checkpoint)
                    stages = processes.enter_context(
                        make_stages(started, run_dir, timers, inspector=MachineRecord(config))
                    )
                    stop.listen()  # imported libraries may have replaced signal handlers
            except StopAtOnce:
                logger.info("asked to stop (%s) before the processes were up", stop.reason())
                summary = RunSummary(before=None, after=None, stopped_after=first, stop_reason=stop.reason())
            else:
                controller = Controller(config, folder, facts, inputs, stages, sinks, display, stop_reason=stop.reason)
                summary = controller.run(checkpoint)
        ending.outcome = _outcome(summary)
        if config.checkpoint.export_hf and summary.stopped_after is None:
            display.stage("export")
            _export(config, folder)
    return summary


def _pinned_inputs(config: RunConfig, recorded: Path | None) -> tuple[RunConfig, RunInputs]:
    """The checked inputs of a run, and its configuration with what they depend on besides: commits and a date.

    Args:
        config: as it was asked for.
        recorded: configuration of the run that is continued; None: a new one.
    """
    config = pin_data_sets(config, load_config(recorded) if recorded is not None and recorded.exists() else None)
    inputs = check_inputs(config, resume=recorded is not None)
    if any(one.statement.needs_judge for one in run_rewards(config.reward)):
        check_judge(config.reward.judge)
    return pin_date(config, inputs.template_date), inputs


def _check_memory(config: RunConfig, architecture: Architecture) -> None:
    """Says what a run on this machine's CPUs will take of the memory that is free; warns if that is too little.

    Raises:
        ConfigError: the engines' caches alone do.
    """
    if is_cpu_build() and not config.cluster.address:
        needed = memory_needed(config, architecture, free_bytes=memory()[1])
        said, is_enough = check_free(config.rollout, needed, where="rollout")
        logger.log(logging.INFO if is_enough else logging.WARNING, "the run %s", said)


def _export(config: RunConfig, folder: RunFolder) -> None:
    """Exports the last checkpoint in Hugging Face format, in this process."""
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


def _outcome(summary: RunSummary) -> str:
    """How a run ended, for ``run_state.json``."""
    if summary.stopped_after is None:
        return run_state.FINISHED
    return f"stopped after step {summary.stopped_after}: {summary.stop_reason}"


def _resume_notes(checkpoint: Checkpoint | None, facts: RunFacts, folder: RunFolder) -> list[str]:
    """Notes about resuming from this checkpoint, or from the start where there is none yet.

    Raises:
        CheckpointError: it is from another model.
    """
    metrics, first = folder.path / METRICS_FILE, checkpoint.state.step if checkpoint else 0
    rows, _ = read_what_there_is(metrics) if metrics.exists() else ([], "")
    last = max((row["step"] for row in rows), default=0)
    origin = f"the last checkpoint is of step {first}" if checkpoint else "there is no checkpoint yet"
    again = f"step {last}" if last == first + 1 else f"steps {first + 1} to {last}"
    notes = [f"{origin}: {again}, finished before, will be done again"] if last > first else []
    if checkpoint is None:
        return notes or [f"there is nothing to resume in {folder.path}: the run begins anew"]
    notes += [checkpoint.note] if checkpoint.note else []
    if folder.other_sums:
        notes.append(
            f"OTHER OPTIONS THAN AT THE LAST START ({', '.join(folder.other_sums)}): sums round in another order, so "
            f"the run is not equal to the last bit to one that was not resumed"
        )
    if checkpoint.manifest is None:
        return [*notes, f"{checkpoint.path} is taken as it is: neither its files nor its model are checked"]
    check_model(checkpoint.path, checkpoint.manifest, facts)
    changes = layout_changes(checkpoint.manifest, facts)
    if not changes:
        return notes
    return [
        *notes,
        f"ANOTHER LAYOUT ({', '.join(changes)}): weights, optimizer, schedule, sampler and counters go on; random "
        f"states start from the seed and sums round in another order, so the run is not equal to the last bit to one "
        f"that was not resumed",
    ]


def _check_adapter(config: RunConfig, architecture: Architecture) -> None:
    """Raises ConfigError unless the model can have such adapters, and the sampler can get them."""
    check_adaptable(architecture, config.adapter)
    if config.adapter.pushes_alone and architecture.experts is not None and is_cpu_build():
        raise ConfigError(
            "adapter.push='adapters' with a mixture of experts: vLLM's CPU build has no experts beside adapters; use "
            "push='merged'"
        )
    if config.adapter.pushes_alone and converted_weights(Path(config.model.path)) is not None:
        raise ConfigError(
            f"adapter.push='adapters' with model.path={config.model.path}: vLLM reads the frozen weights itself, and "
            f"cannot read a converted folder; name the Hugging Face folder, or use push='merged'"
        )


def _check_peft_folder(config: RunConfig, architecture: Architecture) -> None:
    """Raises ConfigError unless a run can begin with the adapters of a folder, if one is named."""
    if config.adapter.path:
        PeftFolder(Path(config.adapter.path), architecture, config.adapter).check_values()


def _started_with(config: RunConfig, architecture: Architecture, checkpoint: Checkpoint | None) -> RunConfig:
    """What processes are started with: adapters that a checkpoint has need no folder to begin with.

    Raises:
        ConfigError: there is no checkpoint, and the folder cannot be used.
    """
    if checkpoint is not None:
        return replace(config, adapter=replace(config.adapter, path=""))
    _check_peft_folder(config, architecture)
    return config


def check_inputs(config: RunConfig, *, resume: bool = False) -> RunInputs:
    """Reads and checks the run's inputs, for ``config`` and ``train``.

    Args:
        config: of the run.
        resume: adapters may be in a checkpoint, so that the folder that they began with need not be there; and what
            only new runs are refused for is no reason to end one.

    Raises:
        ConfigError: the model folder, the reference's or the adapters', their values, the layout, the algorithm, this
            machine, the loggers, the reward function, the environment or the number of prompts cannot be used.
        DataError: a data set is missing, empty or malformed.
    """
    if not resume:
        config.check_new()
    model = Path(config.model.path)
    architecture = read_architecture(model)
    architecture.check_layout(config.parallel)
    check_host(config.cluster, config.rollout, architecture)
    experts = architecture.experts
    config.balance.check_model(has_experts=experts is not None, has_bias=experts is not None and experts.has_bias)
    if experts is None:
        config.update.check_dense()
        config.model.check_dense()
    if config.model.max_sequence_tokens > architecture.max_positions:
        raise ConfigError(
            f"model.max_sequence_tokens={config.model.max_sequence_tokens} exceeds the model's "
            f"{architecture.positions_said}"
        )
    algorithm_of(config.algorithm)
    check_loggers(config.logging)
    rewards = run_rewards(config.reward)
    check_threshold(rewards, config.algorithm.success_threshold, option="--algorithm.success-threshold")
    if any(one.statement.needs_sandbox for one in rewards):
        check_sandbox(config.reward.sandbox, config.reward.packages)
    check_weights(model, architecture)
    if config.adapter.is_on:
        _check_adapter(config, architecture)
        if not resume:
            _check_peft_folder(config, architecture)
    if config.reference.path:
        reference = Path(config.reference.path)
        check_same_model(reference, architecture)
        check_weights(reference, architecture)
    tokenizer = load_tokenizer(config.model.path)
    check_stop_strings(model, config.rollout.sampling, where="rollout.sampling")
    check_stop_strings(model, config.evaluation.sampling, where="evaluation.sampling")
    if config.environment.name:
        stop_ids = (*stop_token_ids(model, tokenizer), *config.rollout.sampling.stop_token_ids)
        check_conversation(config.environment, config.data, tokenizer, stop_ids=stop_ids)
    inputs = read_inputs(config, tokenizer, vocab_size=architecture.vocab_size)
    if config.data.prompts_per_step > len(inputs.train):
        lost = f"; {inputs.lost}" if inputs.lost else ""
        raise ConfigError(
            f"data.prompts_per_step={config.data.prompts_per_step} exceeds the {len(inputs.train)} usable "
            f"problems of {config.data.train_path}{lost}"
        )
    return inputs
