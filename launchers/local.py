"""Runs a recipe on this machine, through nemo-run: what ``launchers.slurm`` does, without a batch system.

``python -m launchers.local RECIPE [--run-dir DIR] [--dry-run] [--any.field VALUE ...]``

The run goes on from its last checkpoint if it has one. The resolved configuration that it was started with stays in
``RUN/launch``, what it prints in nemo-run's folder below. Signals are passed on to it: it saves itself and stops.
"""

import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from gtpo_megatron.cli.recipe import parse
from gtpo_megatron.config.serialize import to_yaml
from gtpo_megatron.errors import ConfigError, DataError, GTPOError, WorkerError
from gtpo_megatron.run_folder.state import read_state
from gtpo_megatron.run_folder.stop_request import EXIT_STOPPED, SHELL_OFFSET
from launchers.checks import check_layout, check_paths
from launchers.job_folder import DRY_RUN, check_writable
from launchers.options import LaunchOptions
from launchers.passed_signals import PassedSignals
from launchers.script_values import quoted

PROGRAM = "python -m launchers.local"
MODULE = "gtpo_megatron.cli"
EXIT_FAILED, EXIT_USAGE = 1, 2


def main() -> None:
    """Entry of ``python -m launchers.local``."""
    sys.path.insert(0, str(Path.cwd()))
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Status 0 for a run that came to its end, 75 for one that was stopped and saved, 143 for one ended by SIGTERM."""
    try:
        return launch(parse("", LaunchOptions, arguments, program=PROGRAM))
    except ConfigError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:  # before there was a run
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return SHELL_OFFSET + signal.SIGINT
    except (GTPOError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return EXIT_FAILED


def launch(options: LaunchOptions) -> int:
    """Checks, writes, runs, waits."""
    options.check()
    run_dir = Path(options.run_dir or f"runs/{options.config.name}").absolute()
    check_paths(options.config, run_dir, is_dry_run=options.dry_run)
    check_layout(options.run)
    check_writable(run_dir)
    stamp = DRY_RUN if options.dry_run else datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    folder = run_dir / "launch" / f"local-{stamp}"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(to_yaml(options.config), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"run folder {run_dir} cannot be written: {error.strerror}; choose another") from error
    command = [options.command, str(folder / "config.yaml"), "--run-dir", str(run_dir), "--resume"]
    if options.dry_run:
        print(f"would run  {sys.executable} -m {MODULE} {' '.join(command)}")
        print(f"written    {folder}: nothing was started")
        return 0
    began = time.time()
    state, asked = _run(folder, command)
    if state == "SUCCEEDED":
        return 0
    try:
        ended = read_state(run_dir)
    except DataError:  # the run failed, and the logs say why
        ended = None
    outcome = ended.outcome if ended and ended.started_at > began else ""
    if outcome.startswith("stopped"):
        return EXIT_STOPPED
    if asked is not None and (not outcome or outcome.startswith(KeyboardInterrupt.__name__)):
        print(f"{PROGRAM}: {asked.name} has ended the run; the same command goes on from its last checkpoint")
        return SHELL_OFFSET + asked
    raise WorkerError(
        f"the run {state.lower()}{f': {outcome}' if outcome else ''}; logs: {folder}, {run_dir / 'log.txt'}"
    )


def _run(folder: Path, command: list[str]) -> tuple[str, signal.Signals | None]:
    """Runs the command to its end.

    Returns:
        nemo-run's word for how it ended, and the first signal that was passed on.
    """
    os.environ["NEMORUN_HOME"] = str(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what nemo-run imports
        import nemo_run

    nemo_run.config.set_nemorun_home(str(folder))
    experiment: Any = nemo_run.Experiment(
        "gtpo",
        id="gtpo_local",
        base_dir=str(folder),
        log_level="ERROR",
        clean_mode=True,
        enable_goodbye_message=False,
        skip_status_at_exit=True,
        serialize_metadata_for_scripts=False,
    )
    with PassedSignals() as signals, experiment:  # which waits for the run at its end
        # nemo-run starts processes in a folder of its own, while paths and recipes are relative to where one stands
        words = " ".join(quoted("a word of the command", word) for word in (sys.executable, "-m", MODULE, *command))
        script = nemo_run.Script(inline=f"cd {quoted('the current folder', Path.cwd())} && exec {words}")
        experiment.add(script, executor=nemo_run.LocalExecutor(), name=command[0], tail_logs=True)
        experiment.run(detach=False)
        signals.run_has_started()
    return str(experiment.jobs[0].state.name), signals.first


if __name__ == "__main__":
    main()
