"""Trackio, which keeps runs on this machine; ``trackio show`` draws them."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gtpo_megatron.config.output import LoggingConfig
from gtpo_megatron.observability.loggers.kept_id import new_or_kept_id


class TrackioSink:
    """One run of a Trackio project, which a resumed run continues by its name.

    Args:
        folder: the run folder.
        logging_config: names the project.
        run_config: the resolved configuration, shown beside the run.
    """

    def __init__(self, folder: Path, *, logging_config: LoggingConfig, run_config: Mapping[str, Any]) -> None:
        self._trackio: Any = importlib.import_module("trackio")  # an optional extra: only if chosen
        self._trackio.init(
            project=logging_config.trackio_project,
            name=f"{folder.name}-{new_or_kept_id(folder / 'trackio_run_id.txt')}",
            config=dict(run_config),
            resume="allow",
            embed=False,
        )

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Logs one step."""
        self._trackio.log(dict(scalars), step=step)

    def close(self) -> None:
        """Writes what is buffered."""
        self._trackio.finish()
