"""What a command is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

EXIT_STOPPED = 75
"""A run that was asked to stop and is saved: start it again with ``--resume`` (``EX_TEMPFAIL`` of sysexits.h)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One command of ``gtpo-megatron``.

    Attributes:
        usage: its lines in the overview: a synopsis, then what it does, indented further.
        run: takes the arguments after the command's name and returns the exit status.
    """

    usage: str
    run: Callable[[Sequence[str]], int]
