"""The live display of a training run in a terminal; without a terminal, one plain line per step."""

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gtpo_megatron.config.problems import HELDOUT
from gtpo_megatron.observability.measured_sets import (
    BenchmarkMean,
    interval,
    labels_among,
    mean_metric,
    percent,
    set_name,
)
from gtpo_megatron.observability.timers import duration
from gtpo_megatron.sentence import print_sentence

REFRESHES_PER_S = 2.0
"""Enough for a clock in seconds; more flickers over a slow connection."""
LEAST_SHOWN_S = 0.05
"""A quicker stage is not named."""
_STAGES = (
    "rollout",
    "rollout_wait",
    "reward",
    "score",
    "credit",
    "update",
    "weight_sync",
    "to_trainer",
    "to_push",
    "to_engine",
)
"""What a step does one after another."""
_BESIDE = ("rollout", "reward")
"""Stages that run beside the trainer where it waits for responses sampled ahead."""
_AFTER = ("push_check", "evaluation", "checkpoint")
"""What may follow a step, and is no part of its seconds."""
STEPS_FOR_TIME_LEFT = 10
"""Steps averaged for the time left."""
LEAST_TREND = 16
MOST_TREND = 40
"""Characters of a trend; in between as many as there is room for."""
LABEL_WIDTH, VALUE_WIDTH, GAP = 12, 14, 2
COLUMN_WIDTH = LABEL_WIDTH + VALUE_WIDTH + LEAST_TREND + 3 * GAP
"""A metric with its trend; values that are wider take of the trend."""
FRAME_WIDTH = 6
"""Border and padding of the panel."""
MOST_COLUMNS = 3

FINISHED = "finished"
_BARS = "▁▂▃▄▅▆▇█"


def _fixed(digits: int, unit: str = "") -> Callable[[float], str]:
    return lambda value: f"{value:,.{digits}f}{unit}"


@dataclass(frozen=True, slots=True)
class _PanelRow:
    """One displayed metric with its label and the format of its value."""

    name: str
    label: str
    write: Callable[[float], str]


_REWARD = _PanelRow("rollout/reward_mean", "reward", _fixed(3))
_NO_ACCURACY = _PanelRow("", "accuracy", percent)
_SETS_MEAN = "mean over benchmarks"
"""Used as a metric name in this display only."""
_ROWS = (
    _PanelRow("policy/entropy_nats", "entropy", _fixed(3, " nats")),
    _PanelRow("rollout/response_length_tokens", "length", _fixed(1, " tokens")),
    _PanelRow("throughput/tokens_per_s", "speed", _fixed(0, " tokens/s")),
    _PanelRow("sync/logprob_gap_p99", "log-prob gap", lambda value: f"{value:.1e} nats"),
)
_WIDE_ROWS = (
    _PanelRow("rollout/truncated_frac", "cut off", _fixed(3)),
    _PanelRow("policy/clip_frac", "clipped", _fixed(4)),
    _PanelRow("optimizer/grad_norm", "grad norm", _fixed(3)),
)
"""Shown beside the others where there is room."""
_SUPERVISED_ROWS = (
    _PanelRow("sft/loss", "loss", _fixed(4, " nats")),
    _PanelRow("sft/heldout_loss", "held out", _fixed(4, " nats")),
    _PanelRow("throughput/tokens_per_s", "speed", _fixed(0, " tokens/s")),
    _PanelRow("optimizer/grad_norm", "grad norm", _fixed(3)),
)
"""Of a warm start."""


class TrainingDisplay:
    """Shows step, main metrics with their trends, the running stage and the time left.

    On a terminal it draws a panel below the notes and log lines. Otherwise (a file, CI) it writes one line per step,
    with the time by stage instead of the running stage.

    Args:
        num_steps: number of the last step.
        title: title of the run, such as ``gtpo · tiny_cpu``.
        first_step: number of steps done before a resume.
        console: the output; pass the same one to ``logs.set_up_logs``. None: stdout.
        is_live: draw the panel; None: if the console is an interactive terminal.
        is_supervised: a warm start, which has a loss in the place of rewards.
    """

    def __init__(
        self,
        *,
        num_steps: int,
        title: str,
        first_step: int = 0,
        console: Console | None = None,
        is_live: bool | None = None,
        is_supervised: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._is_supervised = is_supervised
        self._num_steps = num_steps
        self._title = title
        self._step = first_step
        self._console = console or Console()
        self._is_live = self._console.is_interactive and self._console.file.isatty() if is_live is None else is_live
        self._clock = clock
        self._start = self._step_start = self._stage_start = clock()
        self._stage = ""
        self._starting = "starting"
        self._step_times = ""
        self._step_seconds: deque[float] = deque(maxlen=STEPS_FOR_TIME_LEFT)
        self._history: defaultdict[str, list[float]] = defaultdict(list)
        self._sets: list[str] = []
        self._intervals: dict[str, tuple[float, float]] = {}
        self._outcome: str | None = None
        self._live: Live | None = None

    def __enter__(self) -> "TrainingDisplay":
        self._start = self._step_start = self._stage_start = self._clock()
        if self._is_live:
            self._live = Live(
                get_renderable=self._panel, console=self._console, refresh_per_second=REFRESHES_PER_S, transient=False
            )
            self._live.start()
        else:
            self._line(f"{self._title}: steps {self._step + 1} to {self._num_steps}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._outcome = f"stopped in {self._stage or self._starting} by {kind.__name__}"
        else:
            self._outcome = FINISHED if self._step >= self._num_steps else "stopped early"
        if self._live is not None:
            self._live.stop()
            self._live = None
        else:
            self._line(
                f"{self._title}: {self._outcome} after step {self._step}, {duration(self._clock() - self._start)}"
            )

    def stage(self, name: str) -> None:
        """Sets the running stage; cheap enough for every stage of every step."""
        self._stage, self._stage_start = name, self._clock()

    def starting(self, doing: str, how_far: str = "") -> None:
        """Says what the start is doing, until the next call; without a terminal, a line for each new thing.

        Args:
            doing: such as ``loading``; empty: the start is over.
            how_far: such as ``ranks 1 of 2``.
        """
        if doing != self._starting:
            self._stage_start = self._clock()
            if doing and self._live is None:
                self._line(f"{self._title}: {doing}, {duration(self._stage_start - self._start)}")
        self._starting, self._stage = doing, how_far

    def step_done(self, step: int, scalars: Mapping[str, float]) -> None:
        """Shows the numbers of a finished step.

        Args:
            step: its number, 1 to ``num_steps``; 0 for measurements before training.
            scalars: values by metric name, as for the sinks.
        """
        now = self._clock()
        if step > self._step:
            self._step_seconds.append((now - self._step_start) / (step - self._step))
            self._step = step
        self._step_start = now
        self._starting, self._step_times = "", _seconds_by_stage(scalars)
        if measured := labels_among(scalars):
            self._sets = measured
            self._intervals = {mean_metric(measured[0]): interval(scalars, measured[0])}
            if (overall := BenchmarkMean.of(scalars, measured)) is not None:
                scalars = {**scalars, _SETS_MEAN: overall.mean}
                self._intervals[_SETS_MEAN] = overall.interval
        for row in (*self._rows, *self._wide_rows):
            if row.name in scalars:
                self._history[row.name].append(float(scalars[row.name]))
        if self._live is None:
            self._line(self._plain_step(step, scalars))
        else:
            self._live.refresh()

    def note(self, text: str) -> None:
        """Writes a line above the panel, or between the plain lines."""
        self._line(text)

    @property
    def seconds_left(self) -> float | None:
        """Estimate from the last steps; None before the first step is done."""
        if not self._step_seconds:
            return None
        return max(self._num_steps - self._step, 0) * sum(self._step_seconds) / len(self._step_seconds)

    @property
    def _rows(self) -> list[_PanelRow]:
        """The displayed metrics; of held-out sets the first, and the mean over benchmarks if there are several."""
        if self._is_supervised:
            return list(_SUPERVISED_ROWS)
        accuracy = [_PanelRow(mean_metric(label), set_name(label), percent) for label in self._sets[:1]]
        num_benchmarks = sum(label != HELDOUT for label in self._sets)
        if num_benchmarks > 1:
            accuracy.append(_PanelRow(_SETS_MEAN, f"mean of {num_benchmarks} sets", percent))
        return [_REWARD, *(accuracy or [_NO_ACCURACY]), *_ROWS]

    @property
    def _wide_rows(self) -> tuple[_PanelRow, ...]:
        return () if self._is_supervised else _WIDE_ROWS

    # ---------------------------------------------------------------------------------------------------- plain lines

    def _line(self, text: str) -> None:
        print_sentence(self._console, text)

    def _plain_step(self, step: int, scalars: Mapping[str, float]) -> str:
        parts = [f"step {step}/{self._num_steps}"]
        parts += [f"{row.label} {self._value(row)}" for row in self._rows if row.name in scalars]
        if times := _seconds_by_stage(scalars):
            parts.append(times)
        if step and self.seconds_left is not None:
            parts.append(f"left {duration(self.seconds_left)}")
        return " · ".join(parts)

    # -------------------------------------------------------------------------------------------------- the live panel

    def _panel(self) -> RenderableType:
        now = self._clock()
        width = self._console.width
        inside = width - FRAME_WIDTH
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        left = self.seconds_left
        times = Text(duration(now - self._start))
        if self._outcome is None:
            times.append(" so far" if left is None else f" + {duration(left)} left", style="dim")
        head.add_row(
            Text.assemble(("step ", "dim"), (f"{self._step}", "bold"), (f"/{self._num_steps}", "dim")),
            ProgressBar(
                total=self._num_steps,
                completed=self._step,
                complete_style="cyan",
                finished_style="green",
                style="grey23",
            ),
            times,
        )
        if self._outcome is None:
            doing = " · ".join(part for part in (self._starting, self._stage) if part)
            foot = Text.assemble(("now ", "dim"), (doing, "cyan"))
            foot.append(f"  {duration(now - self._stage_start)}", style="dim")
        else:
            foot = Text(self._outcome, style="bold green" if self._outcome == FINISHED else "bold red")
        below = [Text(f"last step {self._step_times}", style="dim", no_wrap=True, overflow="ellipsis")]
        return Panel(
            Group(head, Padding(self._grid(inside), (1, 0)), *(below if self._step_times else []), foot),
            title=Text(self._title, style="bold"),
            title_align="left",
            border_style="grey37",
            padding=(1, 2, 0, 2),
            width=width,
        )

    def _grid(self, width: int) -> Table:
        """The metrics in as many columns as fit, with trends as long as fit."""
        columns = max(1, min(MOST_COLUMNS, (width + GAP) // (COLUMN_WIDTH + GAP)))
        rows = [*self._rows, *(self._wide_rows if columns == MOST_COLUMNS else ())]
        room = (width - (columns - 1) * GAP) // columns - LABEL_WIDTH - 2 * GAP
        values = max([VALUE_WIDTH, *(len(self._value(row)) for row in rows if self._history[row.name])])
        trend_width = max(LEAST_TREND, min(MOST_TREND, room - values))
        grid = Table.grid(padding=(0, GAP))
        for _ in range(columns):
            grid.add_column(no_wrap=True, style="dim", min_width=LABEL_WIDTH)
            grid.add_column(no_wrap=True, min_width=VALUE_WIDTH)
            grid.add_column(no_wrap=True, style="cyan", min_width=trend_width)
        cells = [self._cells(row, trend_width) for row in rows]
        for first in range(0, len(cells), columns):
            grid.add_row(*[cell for metric in cells[first : first + columns] for cell in metric])
        return grid

    def _cells(self, row: _PanelRow, trend_width: int) -> tuple[RenderableType, RenderableType, RenderableType]:
        values = self._history[row.name]
        if not values:
            return row.label, Text("-", style="dim"), ""
        value = Text(self._value(row), style="bold" if math.isfinite(values[-1]) else "bold red")
        if row.write is percent:  # too few points for a trend: show the first value
            begin = Text(f"from {row.write(values[0])}", style="dim") if len(values) > 1 else Text("")
            return row.label, value, begin
        return row.label, value, trend(values, trend_width) if self._can_draw else ""

    @property
    def _can_draw(self) -> bool:
        return self._console.encoding.startswith("utf")

    def _value(self, row: _PanelRow) -> str:
        values = self._history[row.name]
        if not math.isfinite(values[-1]):
            return str(values[-1])
        written = row.write(values[-1])
        low, high = self._intervals.get(row.name, (math.nan, math.nan))
        return f"{written} [{100 * low:.1f}, {100 * high:.1f}]" if math.isfinite(low + high) else written


def _seconds_by_stage(scalars: Mapping[str, float]) -> str:
    """``6.3 s (update 2.7, rollout 2.4, rest 1.2) + evaluation 7.2``; empty if the step was not timed.

    The parts in brackets add up to the step; behind it is what followed it.
    """
    seconds = {name: scalars.get(f"timing/{name}_s", 0.0) for name in ("step", *_STAGES, *_AFTER)}
    if not seconds["step"]:
        return ""
    beside = _BESIDE if "timing/rollout_wait_s" in scalars else ()
    parts = {name: seconds[name] for name in _STAGES if name not in beside}
    slowest = sorted((name for name in parts if parts[name] >= LEAST_SHOWN_S), key=lambda name: -parts[name])
    named = [f"{name} {parts[name]:.1f}" for name in slowest]
    if named and (rest := seconds["step"] - sum(parts[name] for name in slowest)) >= LEAST_SHOWN_S:
        named.append(f"rest {rest:.1f}")
    text = f"{seconds['step']:.1f} s" + (f" ({', '.join(named)})" if named else "")
    return text + "".join(f" + {name} {seconds[name]:.1f}" for name in _AFTER if seconds[name] >= LEAST_SHOWN_S)


def trend(values: Sequence[float], width: int) -> str:
    """Draws a series as at most ``width`` block characters, each the mean of consecutive values.

    A constant series is drawn at half height; values that are not finite leave a gap.
    """
    count = min(width, len(values))
    means = []
    for index in range(count):
        share = values[index * len(values) // count : (index + 1) * len(values) // count]
        finite = [value for value in share if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    finite_means = [mean for mean in means if math.isfinite(mean)]
    if not finite_means:
        return " " * count
    low, high = min(finite_means), max(finite_means)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        return "".join(_BARS[3] if math.isfinite(mean) else " " for mean in means)
    steps = len(_BARS) - 1
    return "".join(_BARS[round(steps * (mean - low) / (high - low))] if math.isfinite(mean) else " " for mean in means)
