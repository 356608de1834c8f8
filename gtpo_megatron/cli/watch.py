"""``gtpo-megatron watch``."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from gtpo_megatron.cli.arguments import parse_options
from gtpo_megatron.cli.command import Command
from gtpo_megatron.cli.report import checked_price
from gtpo_megatron.cli.status import screen
from gtpo_megatron.companions.status import RunStatus, read_status
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.errors import ConfigError, GTPOError
from gtpo_megatron.observability.timers import duration

PORT = 8642


@configuration
class WatchOptions:
    """Options of ``watch``.

    Attributes:
        runs: run folders; several are drawn side by side.
        port: port on 127.0.0.1; 0 takes a free one.
        dollars_per_gpu_hour: price of a GPU and hour, for the cost of each run; 0 means that no cost is shown.
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
    port: int = PORT
    dollars_per_gpu_hour: float = 0.0


def run(arguments: Sequence[str]) -> int:
    """``watch RUN ...``, until interrupted."""
    from gtpo_megatron.companions.report.run_data import run_names
    from gtpo_megatron.companions.report.watch import LiveReport, ReportServer

    options = parse_options(WatchOptions, arguments, program="gtpo-megatron watch")
    folders = [Path(name) for name in options.runs]
    if not folders:
        raise ConfigError("watch needs at least one run folder")
    named = list(zip(folders, run_names(folders), strict=True))
    report = LiveReport(
        folders,
        status=lambda: "   |   ".join(status_line(*each) for each in named),
        dollars_per_gpu_hour=checked_price(options.dollars_per_gpu_hour),
    )
    server = ReportServer(report, port=options.port)
    sys.stdout.write(f"{server.url} follows {', '.join(options.runs)}; Ctrl-C ends\n")
    sys.stdout.flush()
    try:
        server.serve()
    except KeyboardInterrupt:
        sys.stdout.write("\n")
    return 0


def status_line(folder: Path, name: str) -> str:
    """One line, such as ``quickstart: running, step 12 of 40 (30%), 8s a step, about 3:44 left``.

    Args:
        folder: the run folder.
        name: the run's name on the page.
    """
    try:
        status = read_status(folder)
    except (GTPOError, OSError) as error:  # for example a file that the run is replacing
        return f"{name}: {error}"
    if status.state == "running" and not status.step:
        return f"{name}: running, step 0 of {status.num_steps}; {_first_to_come(status)}"
    return f"{name}: {status.state}, step {dict(screen(status))['step']}"


def _first_to_come(status: RunStatus) -> str:
    """What appears next on the page of a run without a step."""
    if status.accuracies:
        return "measured before training; curves and responses appear after step 1"
    since = "" if status.driver is None else f" ({duration(max(0.0, time.time() - status.driver.started_at))} so far)"
    return (
        f"starting{since}: accuracy before training appears first, where evaluation.at_start asks for it, curves and "
        "responses after step 1"
    )


COMMAND = Command(
    usage="""\
  watch RUN ... [--port N]
                    serves that page for running jobs on 127.0.0.1; it follows them""",
    run=run,
    options=WatchOptions,
)
