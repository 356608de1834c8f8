"""What a command is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One command of ``gtpo-megatron``.

    Attributes:
        usage: its lines in the overview: a synopsis, then what it does, indented further.
        run: takes the arguments after the command's name and returns the exit status.
        interrupted: what to do after Ctrl-C, for a command that can be gone on with.
    """

    usage: str
    run: Callable[[Sequence[str]], int]
    interrupted: str = ""
