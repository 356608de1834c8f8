"""SwanLab."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gtpo_megatron.config.output import LoggingConfig
from gtpo_megatron.observability.loggers.kept_id import new_or_kept_id


class SwanLabSink:
    """One experiment of a SwanLab project, which a resumed run continues.

    Args:
        folder: the run folder; ``swanlog`` in it holds what is not sent.
        logging_config: names the project.
        run_config: the resolved configuration, shown beside the experiment.
    """

    def __init__(self, folder: Path, *, logging_config: LoggingConfig, run_config: Mapping[str, Any]) -> None:
        self._swanlab: Any = importlib.import_module("swanlab")  # an optional extra: only if chosen
        self._swanlab.init(
            project=logging_config.swanlab_project,
            experiment_name=folder.name,
            config=dict(run_config),
            logdir=str(folder / "swanlog"),
            mode=logging_config.swanlab_mode,
            id=new_or_kept_id(folder / "swanlab_run_id.txt"),
            resume="allow",
        )

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Logs one step."""
        self._swanlab.log(dict(scalars), step=step)

    def close(self) -> None:
        """Marks the experiment as finished."""
        self._swanlab.finish()
