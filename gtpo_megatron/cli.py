"""The ``gtpo-megatron`` command."""

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.errors import ConfigError, GTPOError

USAGE = """usage: gtpo-megatron COMMAND ...

  train RECIPE [--run-dir DIR] [--resume] [--num-steps N] [--any.field VALUE ...]
                    trains; RECIPE is module:function, such as recipes.tiny_cpu:gtpo
  report RUN ...    draws one page from one or several run folders
  config RECIPE [--any.field VALUE ...]
                    prints the resolved configuration and checks it; starts nothing

--help after a command (and its RECIPE) lists everything it takes."""

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What ``train`` takes besides the recipe's fields.

    Attributes:
        config: every field of the recipe can be overridden.
        run_dir: folder of the run; empty means ``runs/<name>``.
        resume: go on from the folder's last checkpoint.
    """

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    run_dir: str = ""
    resume: bool = False


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What ``report`` takes.

    Attributes:
        runs: run folders; several are drawn side by side.
        output: file to write; empty means ``report.html`` in the first folder.
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    output: str = field(default="")


def load_recipe(name: str) -> RunConfig:
    """Calls the recipe ``module:function``.

    Raises:
        ConfigError: no such module or function, or it returns something else.
    """
    module_name, colon, function_name = name.partition(":")
    if not (colon and module_name and function_name):
        raise ConfigError(f"recipe {name!r}: must be written module:function, such as recipes.tiny_cpu:gtpo")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.startswith(error.name):
            raise ConfigError(f"recipe {name!r}: there is no module {error.name!r} on the module path") from error
        raise
    recipe = getattr(module, function_name, None)
    if not callable(recipe):
        known = sorted(
            key for key, value in vars(module).items() if callable(value) and value.__module__ == module_name
        )
        raise ConfigError(f"recipe {name!r}: {module_name} has no recipe {function_name!r}; it has {', '.join(known)}")
    config = recipe()
    if not isinstance(config, RunConfig):
        raise ConfigError(f"recipe {name!r} returned {type(config).__name__}, expected a RunConfig")
    return config


def resolve(recipe: str, arguments: Sequence[str]) -> TrainOptions:
    """The recipe with the command line's overrides; exits with status 2 and a hint on a typo."""
    default = TrainOptions(config=load_recipe(recipe))
    return tyro.cli(
        TrainOptions,
        prog=f"gtpo-megatron train {recipe}",
        default=default,
        args=list(arguments),
        config=(tyro.conf.AvoidSubcommands,),
    )


def run_train(arguments: Sequence[str]) -> int:
    """``train RECIPE ...``."""
    options = _with_recipe("train", arguments)
    from gtpo_megatron.train import train  # seconds of imports, after a typo has been found

    console = Console()
    run_dir = Path(options.run_dir or f"runs/{options.config.name}")
    summary = train(options.config, run_dir=run_dir, resume=options.resume, console=console)
    if summary.before is not None:
        console.print(f"before: {summary.before}", highlight=False)
    console.print(f"after:  {summary.after}", highlight=False)
    console.print(f"report: {run_dir / 'report.html'}", highlight=False)
    return 0


def run_config(arguments: Sequence[str]) -> int:
    """``config RECIPE ...``."""
    options = _with_recipe("config", arguments)
    from gtpo_megatron.config.serialize import to_yaml
    from gtpo_megatron.train import check_inputs

    check_inputs(options.config)
    sys.stdout.write(to_yaml(options.config))
    return 0


def run_report(arguments: Sequence[str]) -> int:
    """``report RUN ...``."""
    from gtpo_megatron.observability.report import write_report

    options = tyro.cli(ReportOptions, prog="gtpo-megatron report", args=list(arguments))
    folders = [Path(run) for run in options.runs]
    if not folders:
        raise ConfigError("report needs at least one run folder")
    output = Path(options.output) if options.output else folders[0] / "report.html"
    write_report(folders, output)
    sys.stdout.write(f"{output}\n")
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"train": run_train, "report": run_report, "config": run_config}


def main() -> None:
    """Entry of the installed command."""
    sys.path.insert(0, str(Path.cwd()))  # recipes and rewards of the user's own, from wherever they stand
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs one command; an error raised on purpose is one line and status 1 (2 for a wrong call)."""
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(USAGE + "\n")
        return 0 if arguments else EXIT_USAGE
    if arguments[0] not in COMMANDS:
        sys.stderr.write(f"gtpo-megatron: no command {arguments[0]!r}; there are {', '.join(COMMANDS)}\n")
        return EXIT_USAGE
    try:
        return COMMANDS[arguments[0]](arguments[1:])
    except ConfigError as error:
        sys.stderr.write(f"gtpo-megatron: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        sys.stderr.write("gtpo-megatron: interrupted; --resume goes on from the last checkpoint\n")
        return EXIT_INTERRUPTED
    except GTPOError as error:
        sys.stderr.write(f"gtpo-megatron: {type(error).__name__}: {error}\n")
        return EXIT_FAILED


def _with_recipe(command: str, arguments: Sequence[str]) -> TrainOptions:
    if arguments and arguments[0] in ("-h", "--help"):
        sys.stdout.write(USAGE + f"\n\ngtpo-megatron {command} recipes.tiny_cpu:gtpo --help lists every field.\n")
        sys.exit(0)
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(f"{command} needs a recipe first: gtpo-megatron {command} recipes.tiny_cpu:gtpo")
    return resolve(arguments[0], arguments[1:])
