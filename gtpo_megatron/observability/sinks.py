"""Writes the metrics of a step: ``metrics.jsonl`` always, loggers of other libraries and sinks of one's own if chosen.

A sink that fails (such as a lost network) is switched off, logged and counted; it never stops a training run.
``metrics.jsonl`` waits for disk space instead. A wrong name, a step written twice, or a missing library raises.
"""

import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from gtpo_megatron.config.named_function import named_function
from gtpo_megatron.config.output import LoggingConfig
from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.observability.loggers import TensorBoardSink, WandbSink
from gtpo_megatron.observability.metrics import check_name
from gtpo_megatron.run_folder.metrics_file import METRICS_FILE, JsonlSink, truncate_after

_log = logging.getLogger(__name__)


class MetricSink(Protocol):
    """Takes the metrics of each step."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes one step; steps ascend, with gaps allowed."""

    def close(self) -> None:
        """Writes what is buffered."""


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


_FIELDS = {"tensorboard": "tensorboard", "wandb": "wandb_project"}
"""A library, which is an extra too -> the field of ``LoggingConfig`` that chooses it."""


def check_loggers(logging_config: LoggingConfig) -> None:
    """Checks that every logger can be opened; imports no library, but the modules of ``logging.sinks``.

    Raises:
        ConfigError: the library of a chosen logger is not installed, or a sink of one's own is not found.
    """
    for library in chosen_loggers(logging_config):
        field = _FIELDS[library]
        if not _is_installed(library):
            value = getattr(logging_config, field)
            chosen = f"logging.{field} is on" if value is True else f"logging.{field}={value!r}"
            raise ConfigError(
                f"{chosen}, but {library} is not installed; install it (uv pip install {library}) or leave "
                f"logging.{field} out"
            )
    for name in logging_config.sinks:
        _sink_of_yours(name)


def chosen_loggers(logging_config: LoggingConfig) -> list[str]:
    """The libraries that are chosen."""
    return [library for library, field in _FIELDS.items() if getattr(logging_config, field)]


def _sink_of_yours(name: str) -> Callable[..., MetricSink]:
    """A class or function, called with the run folder, ``run_config`` and ``last_row``; docs/metrics.md."""
    return named_function(name, what="logging.sinks", example="./mine.py:MySink")


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
        logging_config: names of the sinks.
        run_config: the resolved configuration, for sinks that show it.
        last_row: last step that a resumed run keeps; later rows are dropped. -1: none is kept. None: a new run.

    Raises:
        ConfigError: a chosen library is not installed, a sink of one's own is not found, or a logger's file in the run
            folder is damaged.
    """
    check_loggers(logging_config)
    if last_row is not None:
        truncate_after(folder / METRICS_FILE, last_row)
    first_step = None if last_row is None else last_row + 1

    libraries: dict[str, Callable[[], MetricSink]] = {
        "tensorboard": lambda: TensorBoardSink(folder, first_step=first_step),
        "wandb": lambda: WandbSink(folder, logging_config=logging_config, run_config=run_config),
    }
    makers: dict[str, Callable[[], MetricSink]] = {"jsonl": lambda: JsonlSink(folder / METRICS_FILE)}
    makers |= {name: libraries[name] for name in chosen_loggers(logging_config)}
    for name in logging_config.sinks:
        makers[name] = partial(_sink_of_yours(name), folder, run_config=run_config, last_row=last_row)
    opened: dict[str, MetricSink] = {}
    failed: dict[str, Exception] = {}
    for name, make in makers.items():
        try:
            opened[name] = make()
        except ConfigError:
            MetricSinks(opened).close()
            raise
        except Exception as error:  # noqa: BLE001 - without a network a library raises its own types
            failed[name] = error
    sinks = MetricSinks(opened)
    for name, reason in failed.items():
        sinks.switch_off(name, reason)
    return sinks
