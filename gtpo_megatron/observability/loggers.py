"""The libraries that metrics may go to besides ``metrics.jsonl``; each is an extra, imported when it is chosen."""

import hashlib
import importlib
import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping
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

        if not isinstance(threading.excepthook, _QuietWriters):
            threading.excepthook = _QuietWriters(threading.excepthook)
        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds one point to every curve."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


class _QuietWriters:
    """Suppresses the traceback of an error in TensorBoard's thread, which the next ``write`` raises again.

    Args:
        before: the hook for all other errors.
    """

    def __init__(self, before: Callable[[threading.ExceptHookArgs], Any]) -> None:
        self._before = before

    def __call__(self, error: threading.ExceptHookArgs) -> None:
        if not (isinstance(error.exc_value, OSError) and type(error.thread).__module__.startswith("tensorboard.")):
            self._before(error)


WANDB_FLUSH_S = 1.0
"""Between two writes of the file that an offline run is; a killed run loses what came later, and by default 15 s."""


def _kept_at_once(wandb: Any) -> dict[str, float]:
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


PARAMETERS_AT_ONCE = 100
"""Parameters that a tracking server takes at a time."""
PARAMETER_CHARACTERS = 500
"""Longest value of a parameter that every store takes."""
NAME_CHARACTERS, DIGEST = 250, 8
"""Longest name of a metric that every store takes, and characters of it that tell cut ones apart."""


class MlflowSink:
    """One run of an MLflow experiment, which a resumed run continues; its parameters are the configuration's fields.

    A step that is made again after a resume has two points; MLflow shows the later one last.

    Args:
        folder: the run folder.
        logging_config: names the experiment and the store.
        run_config: the resolved configuration.
    """

    def __init__(self, folder: Path, *, logging_config: LoggingConfig, run_config: Mapping[str, Any]) -> None:
        mlflow = importlib.import_module("mlflow")  # an optional extra: only if chosen
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._client: Any = mlflow.MlflowClient(tracking_uri=logging_config.mlflow_uri or None)
        id_file = folder / "mlflow_run_id.txt"
        known = kept_id(id_file)
        if known is None:
            name = logging_config.mlflow_experiment
            experiment = self._client.get_experiment_by_name(name)
            experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
            known = str(self._client.create_run(experiment_id, run_name=folder.name).info.run_id)
            self._log_parameters(known, run_config)
            keep_id(id_file, known)
        else:
            self._client.update_run(known, status="RUNNING")
        self._run_id = known

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Logs one step; values that are not finite are left out, since some stores refuse them."""
        now = int(time.time() * 1000)
        points = [
            self._entities.Metric(shortened(name), float(value), now, step)
            for name, value in scalars.items()
            if math.isfinite(value)
        ]
        self._client.log_batch(self._run_id, metrics=points)

    def close(self) -> None:
        """Marks the run as finished."""
        self._client.set_terminated(self._run_id)

    def _log_parameters(self, run_id: str, run_config: Mapping[str, Any]) -> None:
        fields = [
            self._entities.Param(name, str(value)[:PARAMETER_CHARACTERS]) for name, value in flat(run_config).items()
        ]
        for first in range(0, len(fields), PARAMETERS_AT_ONCE):
            self._client.log_batch(run_id, params=fields[first : first + PARAMETERS_AT_ONCE])


def shortened(name: str) -> str:
    """A metric's name that every store takes; a long one (of a benchmark, say) is cut, and ends with its digest."""
    if len(name) <= NAME_CHARACTERS:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:DIGEST]
    return f"{name[: NAME_CHARACTERS - DIGEST - 1]}_{digest}"


def flat(values: Mapping[str, Any], parent: str = "") -> dict[str, Any]:
    """Nested fields by their paths: ``{"a": {"b": 1}}`` becomes ``{"a.b": 1}``."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{parent}.{name}".strip(".")
        found |= flat(value, path) if isinstance(value, Mapping) else {path: value}
    return found


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


ID_DIGITS = 12
"""Hexadecimal digits of a new id."""


def kept_id(file: Path) -> str | None:
    """The id that a file holds; None if there is no such file, or it is empty.

    Raises:
        ConfigError: what it holds is no id.
    """
    found = find_text(file, error=ConfigError)
    return bare_name(found.strip(), str(file), ConfigError) if found else None


def keep_id(file: Path, run_id: str) -> None:
    """Writes the id."""
    write_file(file, f"{run_id}\n")


def new_or_kept_id(file: Path) -> str:
    """The id that the file holds, or a new one, which it holds from now on."""
    run_id = kept_id(file) or uuid.uuid4().hex[:ID_DIGITS]
    keep_id(file, run_id)
    return run_id
