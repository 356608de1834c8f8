"""Finds the Megatron checkpoint that a folder holds or is, for a conversion."""

import logging
from pathlib import Path

from gtpo_megatron.config.serialize import load_config
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.run_folder.folder import CONFIG_FILE, RunFolder
from gtpo_megatron.weights.conversion import converted_weights
from gtpo_megatron.weights.megatron.checkpoint_files import Verify
from gtpo_megatron.weights.megatron.reader import is_checkpoint


def find_checkpoint(source: Path, model: Path | None, verify: Verify = "full") -> tuple[Path, Path]:
    """The Megatron checkpoint that a folder holds or is, and the folder with its model's configuration.

    Args:
        source: a converted folder, a run's folder (its latest checkpoint) or one checkpoint of a run.
        model: folder with config.json and tokenizer; None: the converted folder, or the ``model.path`` of the run.
        verify: how a run's checkpoints are checked before one is chosen.

    Raises:
        ConfigError: neither a converted folder, nor a run's, nor a checkpoint of one; or of a model nobody names.
    """
    converted = converted_weights(source)
    if converted is not None:
        return converted, model or source
    if (source / CONFIG_FILE).is_file():
        latest = RunFolder(source).checkpoints.latest(verify)
        if latest is None:
            raise ConfigError(f"{source} is the folder of a run without a finished checkpoint; wait for its first")
        if latest.note:
            logging.getLogger(__name__).warning(latest.note)
        return latest.path, model or Path(load_config(source / CONFIG_FILE).model.path)
    if not is_checkpoint(source):
        raise ConfigError(
            f"{source} holds no Megatron checkpoint; expected a converted folder (megatron/ in it), a run's folder "
            f"(config.yaml and checkpoints/ in it) or checkpoints/step_N of one"
        )
    config = source.resolve().parent.parent / CONFIG_FILE
    if model is None and not config.is_file():
        raise ConfigError(
            f"{source} is a checkpoint outside its run's folder, so its model is not known; "
            f"name a folder with config.json and tokenizer by --model"
        )
    return source, model or Path(load_config(config).model.path)
