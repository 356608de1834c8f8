"""TensorBoard."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


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
