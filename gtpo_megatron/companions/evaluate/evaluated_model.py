"""Finds the model to evaluate: a Hugging Face folder, a run's exported model, or one of its checkpoints."""

import logging
from dataclasses import dataclass
from pathlib import Path

from gtpo_megatron.companions.evaluate.model_folder import check_model_folder
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.run_folder.checkpoints import LATEST, CheckpointFolder
from gtpo_megatron.run_folder.conversion_lock import alone
from gtpo_megatron.run_folder.state import FINISHED, read_state
from gtpo_megatron.weights.conversion import ConversionProgress, megatron_to_hf
from gtpo_megatron.weights.hf.reader import check_one_model
from gtpo_megatron.weights.megatron.checkpoint_files import Verify, check_checkpoint, is_checkpoint

logger = logging.getLogger(__name__)

EXPORT = "hf"
UNVERIFIED = "hf-unverified"
"""Folder of a checkpoint that was converted without verification; not used if verification is on."""
EVALUATIONS = "evaluations"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedModel:
    """The model to evaluate.

    Attributes:
        folder: its folder in Hugging Face format.
        named: the folder that the user named.
        checkpoint: the run's checkpoint, such as ``step_40``; empty for a model folder and an exported model.
    """

    folder: Path
    named: str
    checkpoint: str = ""


def find_model(folder: Path, checkpoint: str, run: RunConfig | None, *, verify: Verify = "full") -> EvaluatedModel:
    """Finds the folder to load; a checkpoint is converted once, into ``evaluations/step_N/hf`` of its run.

    Without verification the target is ``hf-unverified``, unless ``hf`` exists. If another process is converting the
    checkpoint, this one waits and uses its result.

    Args:
        folder: the folder that the user named.
        checkpoint: name of the run's checkpoint, or ``latest``; empty: the exported model, or the latest checkpoint of
            a run that has not ended, or whose last start has not exported its model.
        run: the run's configuration; None for a model folder.
        verify: which checks a checkpoint must pass before it is converted.

    Raises:
        ConfigError: it is neither a model nor a run with one, a checkpoint of a model folder is requested, or the run's
            folder cannot be written.
        CheckpointError: the checkpoint is damaged, or the disk is full.
    """
    if run is None:
        if checkpoint:
            raise ConfigError(f"checkpoint={checkpoint!r}: {folder} is no run folder (it has no config.yaml)")
        return _checked(EvaluatedModel(folder=folder, named=str(folder)))
    if not checkpoint and _is_export_last(folder, run):
        return _checked(EvaluatedModel(folder=folder / EXPORT, named=str(folder)))
    found = _checkpoint(folder, checkpoint or LATEST, verify)
    target = folder / EVALUATIONS / found.name / EXPORT
    if verify == "none" and not target.is_dir():
        target = target.with_name(UNVERIFIED)
    if not target.is_dir():
        again: Verify = "none"
        if verify != "none":  # before any folder is created
            check_checkpoint(found, verify)
            again = "sizes"
        with alone(target, otherwise="gtpo-megatron convert megatron-to-hf"):
            if not target.is_dir():  # another process may have created it while this one waited
                logger.warning("%s is converted to %s, which can be removed afterwards", found, target)
                megatron_to_hf(found, Path(run.model.path), target, progress=ConversionProgress(), verify=again)
    return _checked(EvaluatedModel(folder=target, named=str(folder), checkpoint=found.name))


def _checked(model: EvaluatedModel) -> EvaluatedModel:
    check_model_folder(model.folder)
    check_one_model(model.folder)
    return model


def _is_export_last(folder: Path, run: RunConfig) -> bool:
    """Whether a run has an exported model that is known to be of its last step, or nothing else to measure.

    A run that goes on after its end leaves the old export in place until it ends again, whatever ends it before; so
    the record of its last start must say that it has finished, and its configuration that it exports.
    """
    export = folder / EXPORT
    if not export.is_dir():
        return False
    try:
        state = read_state(folder)
    except DataError as error:
        logger.warning("%s; whether the run has ended is not known", error)
        state = None
    if state is not None and state.outcome == FINISHED and run.checkpoint.export_hf:
        return True
    if not any((folder / "checkpoints").glob("step_*")):
        logger.warning(
            "%s may be of an earlier step than the run's last; it is taken, as there is no checkpoint", export
        )
        return True
    logger.warning(
        "%s may be of an earlier step: the run's last start has not finished, or has exported nothing; its latest "
        "checkpoint is taken; to measure the other, name %s",
        export,
        export,
    )
    return False


def _checkpoint(folder: Path, name: str, verify: Verify) -> Path:
    checkpoints = folder / "checkpoints"
    if name == LATEST:
        latest = CheckpointFolder(checkpoints).latest(verify)
        if latest is None:
            raise ConfigError(f"run {folder} has neither an exported model ({folder / EXPORT}) nor a checkpoint yet")
        if latest.note:
            logger.warning(latest.note)
        return latest.path
    there = sorted(path.name for path in checkpoints.glob("step_*") if is_checkpoint(path))
    if name not in there:  # so that no path leaves the run folder
        raise ConfigError(f"checkpoint={name!r}: run {folder} has {', '.join(there) or 'none'}; or say latest")
    return checkpoints / name
