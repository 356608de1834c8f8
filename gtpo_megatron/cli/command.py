"""The record of a subcommand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One command of ``gtpo-megatron``.

    Attributes:
        usage: its lines in the overview: a synopsis, then an indented description.
        run: takes the arguments after the command's name and returns the exit status.
        interrupted: hint after Ctrl-C, if the command can be resumed.
    """

    usage: str
    run: Callable[[Sequence[str]], int]
    interrupted: str = ""
