"""TensorBoard and Weights & Biases, where metrics may go besides ``metrics.jsonl``; imported when they are chosen.

Others: ``examples/own_sink``.
"""

import importlib
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.config.output import LoggingConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.untrusted.text import bare_name, find_text


class TensorBoardSink:
    """``events.out.*`` in the run folder, flushed every step so that a killed run shows all its curves.

    Args:
        folder: the run folder.
        first_step: TensorBoard hides earlier events of this step or later ones; None: a new run.
    """

    def __init__(self, folder: Path, *, first_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes half a second, so only if chosen

        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds one point to every curve."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


WANDB_FLUSH_S = 1.0
"""Between two writes of the file that an offline run is; a killed run loses what came later, and by default 15 s."""


def _flush_settings(wandb: Any) -> dict[str, float]:
    """The setting for it, where the installed version has it."""
    name = "x_transaction_log_flush_interval"
    known = getattr(getattr(wandb, "Settings", None), "model_fields", {})
    return {name: WANDB_FLUSH_S} if name in known else {}


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
            id=kept_id(folder / "wandb_run_id.txt"),
            name=folder.name,
            dir=str(folder),
            resume="allow",
            config=dict(run_config),
            settings={"console": "off"} | _flush_settings(wandb),  # its capture of stdout breaks the live display
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


ID_DIGITS = 12
"""Hexadecimal digits of a new id."""


def kept_id(file: Path) -> str:
    """The id that a file holds, or a new one, which it holds from then on.

    Raises:
        ConfigError: what it holds is no id.
    """
    if found := find_text(file, error=ConfigError):
        return bare_name(found.strip(), str(file), ConfigError)
    run_id = uuid.uuid4().hex[:ID_DIGITS]
    write_file(file, f"{run_id}\n")
    return run_id
