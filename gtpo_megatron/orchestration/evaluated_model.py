"""The model that a user names: a Hugging Face folder, a run's exported model, or one of its checkpoints."""

from dataclasses import dataclass
from pathlib import Path

from gtpo_megatron.errors import ConfigError
from gtpo_megatron.evaluation.model_folder import check_model_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedModel:
    """The model, and where the user found it.

    Attributes:
        folder: in Hugging Face format.
        named: what the user wrote.
        checkpoint: of a run; empty where none was asked for.
    """

    folder: Path
    named: str
    checkpoint: str = ""


def find_model(folder: Path, checkpoint: str, *, is_run: bool) -> EvaluatedModel:
    """The folder to load.

    Raises:
        ConfigError: it is neither a model nor a run that has one, or a checkpoint is asked of a model folder.
    """
    if not is_run:
        if checkpoint:
            raise ConfigError(f"checkpoint={checkpoint!r}: {folder} is no run folder (it has no config.yaml)")
        check_model_folder(folder)
        return EvaluatedModel(folder=folder, named=str(folder))
    exported = folder / "hf"
    if not exported.is_dir():
        raise ConfigError(
            f"run {folder} has no exported model: {exported} is written when the run ends (checkpoint.export_hf)"
        )
    check_model_folder(exported)
    return EvaluatedModel(folder=exported, named=str(folder))
