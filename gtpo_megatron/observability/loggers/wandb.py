"""Weights & Biases."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gtpo_megatron.config.output import LoggingConfig
from gtpo_megatron.observability.loggers.kept_id import new_or_kept_id

FLUSH_S = 1.0
"""Between two writes of the file that an offline run is; a killed run loses what came later, and by default 15 s."""


def _kept_at_once(wandb: Any) -> dict[str, float]:
    """The setting for it, where the installed version has it."""
    name = "x_transaction_log_flush_interval"
    known = getattr(getattr(wandb, "Settings", None), "model_fields", {})
    return {name: FLUSH_S} if name in known else {}


class WandbSink:
    """One run at Weights & Biases, which a resumed run continues.

    Args:
        folder: the run folder; also wandb's own folder for offline runs.
        logging_config: names the project.
        run_config: the resolved configuration, shown beside the run.
    """

    def __init__(self, folder: Path, *, logging_config: LoggingConfig, run_config: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")  # an optional extra: only if chosen
        self._run: Any = wandb.init(
            project=logging_config.wandb_project,
            entity=logging_config.wandb_entity,
            mode=logging_config.wandb_mode,
            id=new_or_kept_id(folder / "wandb_run_id.txt"),
            name=folder.name,
            dir=str(folder),
            resume="allow",
            config=dict(run_config),
            settings={"console": "off"} | _kept_at_once(wandb),  # its capture of stdout breaks the live display
        )
        # wandb's own step counter cannot go back to the checkpoint's step after a crash; a metric can.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Logs one step."""
        self._run.log({"step": step, **scalars})

    def close(self) -> None:
        """Marks the run as finished."""
        self._run.finish()
