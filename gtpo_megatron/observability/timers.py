"""Timers of the stages of a step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gtpo_megatron.observability.metrics import check_name


class StageTimers:
    """Sums seconds per stage; for use by one thread.

    Stages may nest: an outer stage includes its inner ones. A stage entered again while it runs is counted once. A
    stage that raises is counted.

    Args:
        on_stage: called with the name of the running stage (for example ``TrainingDisplay.stage``): at entry, and with
            the outer stage's name when an inner one ends.
        on_start: called with what the start of the run is doing and how far it is (``TrainingDisplay.starting``).
        clock: monotonic seconds.
    """

    def __init__(
        self,
        on_stage: Callable[[str], None] | None = None,
        *,
        on_start: Callable[[str, str], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._on_start = on_start
        self._listeners = [] if on_stage is None else [on_stage]
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._running: list[str] = []

    def tell_also(self, listener: Callable[[str], None]) -> None:
        """Adds another ``on_stage`` listener, which must not raise."""
        self._listeners.append(listener)

    def starting(self, doing: str, how_far: str = "") -> None:
        """Says what the start of the run is doing, which is not timed."""
        if self._on_start is not None:
            self._on_start(doing, how_far)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times its body under ``timing/<name>_s``.

        Raises:
            DataError: ``timing/<name>_s`` is not a metric name.
        """
        check_name(f"timing/{name}_s")
        is_outermost = name not in self._running
        self._running.append(name)
        self._tell()
        start = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - start
            self._running.pop()
            if is_outermost:
                self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            self._tell()

    @property
    def current(self) -> str:
        """The innermost running stage; empty between stages. Other threads may read it."""
        running = self._running
        return running[-1] if running else ""

    def add(self, name: str, seconds: float) -> None:
        """Adds seconds of a stage that ran in another thread or process."""
        check_name(f"timing/{name}_s")
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Returns the seconds since the last call as ``timing/<stage>_s``, and resets them.

        The time of a running stage is added when it ends.
        """
        taken = {f"timing/{name}_s": seconds for name, seconds in sorted(self._seconds.items())}
        self._seconds.clear()
        return taken

    def _tell(self) -> None:
        for listener in self._listeners if self._running else ():
            listener(self._running[-1])


def duration(seconds: float) -> str:
    """``42s``, ``7:05`` minutes or ``3:07:05`` hours."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
