"""Finds and runs a command of ``gtpo-megatron``; to add one, write its file and list it in ``COMMANDS``."""

import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from platform import python_version

from gtpo_megatron import __version__
from gtpo_megatron.cli import (
    completion,
    config,
    contamination,
    convert,
    evaluate,
    examples,
    plan,
    preflight,
    quickstart,
    report,
    sft,
    status,
    study,
    train,
    verify_resume,
    watch,
)
from gtpo_megatron.cli.command import Command, missing_library
from gtpo_megatron.cli.interrupts import interrupt_on_signals, interruption, status_of
from gtpo_megatron.cli.reader import exit_when_pipe_closes
from gtpo_megatron.errors import ConfigError, GTPOError
from gtpo_megatron.untrusted.text import printable, shown

COMMANDS: dict[str, Command] = {
    "train": train.COMMAND,
    "sft": sft.COMMAND,
    "quickstart": quickstart.COMMAND,
    "examples": examples.COMMAND,
    "report": report.COMMAND,
    "watch": watch.COMMAND,
    "evaluate": evaluate.COMMAND,
    "contamination": contamination.COMMAND,
    "study": study.COMMAND,
    "status": status.COMMAND,
    "config": config.COMMAND,
    "plan": plan.COMMAND,
    "preflight": preflight.COMMAND,
    "verify-resume": verify_resume.COMMAND,
    "convert": convert.COMMAND,
}
"""Name -> command, in the order of the overview."""
COMMANDS["completion"] = completion.command(COMMANDS)

EXIT_FAILED = 1
EXIT_USAGE = 2


def main() -> None:
    """Entry of the installed command."""
    sys.path.insert(0, str(Path.cwd()))  # so that the user's recipes and rewards can be imported
    interrupt_on_signals()  # to the very end: the second signal of a request may come late
    with exit_when_pipe_closes():
        status = run(sys.argv[1:])
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """Runs one command; a ``GTPOError`` is printed as one line and gives status 1, a ``ConfigError`` status 2."""
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(usage() + "\n")
        return 0 if arguments else EXIT_USAGE
    if arguments[0] == "--version":
        sys.stdout.write(version() + "\n")
        return 0
    if arguments[0] not in COMMANDS:
        close = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}"
        sys.stderr.write(f"gtpo-megatron: no command {shown(arguments[0])}; {hint}\n")
        return EXIT_USAGE
    return _status(arguments[0], arguments[1:])


def _status(name: str, arguments: Sequence[str]) -> int:
    try:
        return COMMANDS[name].run(arguments)
    except ConfigError as error:
        sys.stderr.write(f"gtpo-megatron: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt as error:
        hint = COMMANDS[name].interrupted
        sys.stderr.write(f"gtpo-megatron: {interruption(error)}{'; ' if hint else ''}{hint}\n")
        return status_of(error)
    except GTPOError as error:
        sys.stderr.write(f"gtpo-megatron: {type(error).__name__}: {error}\n")
        return EXIT_FAILED
    except ModuleNotFoundError as error:
        needed = missing_library(error.name or "", name)
        if needed is None:
            raise
        sys.stderr.write(f"gtpo-megatron: {needed}\n")
        return EXIT_USAGE
    except BrokenPipeError:  # ``main`` handles it
        raise
    except OSError as error:  # such as a name that is too long, or a missing permission
        sys.stderr.write(f"gtpo-megatron: {printable(error)}\n")
        return EXIT_FAILED


def version() -> str:
    """Versions of the package and of what its results depend on, a line each, for the report of a defect."""
    from gtpo_megatron.run_folder.provenance import commit, versions

    others = [f"{name} {number}" for name, number in versions().items() if name != "gtpo-megatron"]
    return "\n".join([f"gtpo-megatron {__version__}", f"commit {commit()}", f"Python {python_version()}", *others])


def usage() -> str:
    """The overview of all commands."""
    commands = "\n".join(command.usage for command in COMMANDS.values())
    return (
        f"usage: gtpo-megatron COMMAND ...\n\n{commands}\n\n"
        "--help after a command (and its RECIPE) lists everything it takes; --version says what is installed."
    )
