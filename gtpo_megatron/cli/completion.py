"""``gtpo-megatron completion``: the script, tyro's, by which a shell completes commands, options and their values."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import make_dataclass
from typing import Annotated, Any, Literal, Union

import tyro

from gtpo_megatron.cli.arguments import parse_options
from gtpo_megatron.cli.command import Command
from gtpo_megatron.cli.recipe import (
    EXAMPLE,
    SFT_EXAMPLE,
    AnyRecipeOptions,
    SftRecipeOptions,
    load_recipe,
    load_sft_recipe,
)
from gtpo_megatron.config.configuration import configuration


@configuration
class CompletionOptions:
    """Prints a script; eval "$(gtpo-megatron completion bash)" makes a shell complete this program.

    Attributes:
        shell: shell that reads it.
    """

    shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional]


def command(commands: Mapping[str, Command]) -> Command:
    """The command.

    Args:
        commands: all commands by name, this one included once it is among them.
    """
    return Command(
        usage="""\
  completion bash|zsh
                    prints what makes a shell complete all of this; docs/command_line.md""",
        run=functools.partial(_run, commands),
        options=CompletionOptions,
    )


def _run(commands: Mapping[str, Command], arguments: Sequence[str]) -> int:
    options = parse_options(CompletionOptions, arguments, program="gtpo-megatron completion")
    kinds = tuple(Annotated[_whole(one), tyro.conf.subcommand(name)] for name, one in commands.items())
    every: Any = Union[kinds]  # noqa: UP007 - of a tuple
    parse_options(every, ["--tyro-print-completion", options.shell], program="gtpo-megatron")  # prints and exits
    return 0


def _whole(command: Command) -> Any:
    """The options of a command with the recipe before them, which has the fields of its example."""
    kind = command.options if isinstance(command.options, type) else object
    if issubclass(kind, SftRecipeOptions):
        default = command.options(config=load_sft_recipe(SFT_EXAMPLE))
    elif issubclass(kind, AnyRecipeOptions):
        default = command.options(config=load_recipe(command.recipe or EXAMPLE))
    else:
        return make_dataclass("Whole", [("options", Annotated[command.options, tyro.conf.arg(name="")])])
    recipe = [("recipe", Annotated[str, tyro.conf.Positional])] if command.needs_recipe else []
    return make_dataclass("Whole", [*recipe, ("options", Annotated[command.options, tyro.conf.arg(name="")], default)])
