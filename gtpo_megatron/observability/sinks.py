"""Writes the metrics of a step: ``metrics.jsonl`` always, TensorBoard and Weights & Biases if chosen.

A sink that fails (such as a lost network) is switched off, logged and counted; it never stops a training run.
``metrics.jsonl`` waits for disk space instead. A wrong name, a step written twice, or a missing library raises.
"""

import importlib.util
import logging
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.config.logging import LoggingConfig
from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.observability.metrics import check_name
from gtpo_megatron.run_folder.metrics_file import METRICS_FILE, JsonlSink, truncate_after
from gtpo_megatron.untrusted.names import bare_name
from gtpo_megatron.untrusted.text import find_text

_log = logging.getLogger(__name__)


class MetricSink(Protocol):
    """Takes the metrics of each step."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes one step; steps ascend, with gaps allowed."""

    def close(self) -> None:
        """Writes what is buffered."""


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


class WandbSink:
    """One run at Weights & Biases; its id is kept in the run folder, so a resumed run continues it.

    Args:
        folder: the run folder; also wandb's own folder for offline runs.
        logging_config: names the project.
        run_config: the resolved configuration, shown beside the run.
    """

    def __init__(self, folder: Path, *, logging_config: LoggingConfig, run_config: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")  # an optional extra: only if chosen
        id_file = folder / "wandb_run_id.txt"
        run_id = (find_text(id_file, error=ConfigError) or uuid.uuid4().hex[:12]).strip()
        bare_name(run_id, str(id_file), ConfigError)
        write_file(id_file, run_id + "\n")
        self._run: Any = wandb.init(
            project=logging_config.wandb_project,
            entity=logging_config.wandb_entity,
            mode=logging_config.wandb_mode,
            id=run_id,
            name=folder.name,
            dir=str(folder),
            resume="allow",
            config=dict(run_config),
            settings={"console": "off"},  # its capture of standard output breaks the live display
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


class MetricSinks:
    """Writes to several sinks, and switches off those that fail.

    Args:
        sinks: sinks by name.

    Attributes:
        failures: the sinks that were switched off, with the reason.
    """

    def __init__(self, sinks: Mapping[str, MetricSink]) -> None:
        self._sinks = dict(sinks)
        self._last_step: int | None = None
        self.failures: dict[str, str] = {}

    @property
    def num_failed(self) -> int:
        """Number of sinks that were switched off."""
        return len(self.failures)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes one step to every sink that still works.

        Raises:
            DataError: a malformed metric name, or a step that is not after the last one.
        """
        for name in scalars:
            check_name(name)
        if self._last_step is not None and step <= self._last_step:
            raise DataError(
                f"metrics of step {step} come after those of step {self._last_step}; write each step once, in order"
            )
        self._last_step = step
        for name, sink in list(self._sinks.items()):
            self._guard(name, lambda sink=sink: sink.write(step, scalars))  # type: ignore[misc]

    def close(self) -> None:
        """Closes every sink that still works; a second call does nothing."""
        for name, sink in list(self._sinks.items()):
            self._guard(name, sink.close)
        self._sinks.clear()

    def __enter__(self) -> "MetricSinks":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _guard(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - vendors raise anything, and a sink must not stop the run
            self.switch_off(name, error)

    def switch_off(self, name: str, error: Exception) -> None:
        """Stops writing to the sink ``name``, logs why and counts it."""
        self._sinks.pop(name, None)
        self.failures[name] = f"{type(error).__name__}: {error}"
        _log.error("metrics sink %s failed and is switched off, training goes on: %s", name, self.failures[name])


def check_loggers(logging_config: LoggingConfig) -> None:
    """Raises ConfigError if the library of a chosen logger is not installed; imports none."""
    if logging_config.tensorboard and not _is_installed("tensorboard"):
        raise ConfigError(
            "logging.tensorboard is on, but TensorBoard is not installed; install it (uv pip install tensorboard) or "
            "set logging.tensorboard=False"
        )
    if logging_config.wandb_project is not None and not _is_installed("wandb"):
        raise ConfigError(
            f"logging.wandb_project={logging_config.wandb_project!r}, but wandb is not installed; install it "
            "(uv pip install wandb) or leave logging.wandb_project out"
        )


def _is_installed(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    return importlib.util.find_spec(module) is not None


def open_sinks(
    folder: Path, logging_config: LoggingConfig, *, run_config: Mapping[str, Any], last_row: int | None = None
) -> MetricSinks:
    """Opens the sinks that the configuration names.

    Args:
        folder: the run folder; must exist.
        logging_config: which sinks.
        run_config: the resolved configuration, for sinks that show it.
        last_row: last step that a resumed run keeps; later rows are dropped. -1: none is kept. None: a new run.

    Raises:
        ConfigError: a chosen library is not installed, or one of its files in the run folder is damaged.
    """
    check_loggers(logging_config)
    if last_row is not None:
        truncate_after(folder / METRICS_FILE, last_row)
    first_step = None if last_row is None else last_row + 1
    makers: dict[str, Callable[[], MetricSink]] = {"jsonl": lambda: JsonlSink(folder / METRICS_FILE)}
    if logging_config.tensorboard:
        makers["tensorboard"] = lambda: TensorBoardSink(folder, first_step=first_step)
    if logging_config.wandb_project is not None:
        makers["wandb"] = lambda: WandbSink(folder, logging_config=logging_config, run_config=run_config)
    opened: dict[str, MetricSink] = {}
    failed: dict[str, Exception] = {}
    for name, make in makers.items():
        try:
            opened[name] = make()
        except ConfigError:
            MetricSinks(opened).close()
            raise
        except Exception as error:  # noqa: BLE001 - wandb.init without a network raises its own types
            failed[name] = error
    sinks = MetricSinks(opened)
    for name, reason in failed.items():
        sinks.switch_off(name, reason)
    return sinks
