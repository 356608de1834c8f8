"""How far the start of a run is: processes of each kind that have answered."""

from collections import Counter
from collections.abc import Callable, Iterable

Starting = Callable[[str, str], None]
"""Takes what the start is doing, and how far it is."""


def counted(doing: str, names: Iterable[str], starting: Starting | None) -> Callable[[str], None] | None:
    """Says ``doing`` with ``ranks 0 of 2 · engines 0 of 1``, and again for each process that has answered.

    Args:
        doing: what the processes do.
        names: of the processes, as in messages.
        starting: is told; None: nobody is.

    Returns:
        Takes the name of a process that has answered; None if nobody is told.
    """
    if starting is None:
        return None
    total = Counter(map(_kind, names))
    answered: Counter[str] = Counter()

    def say() -> None:
        starting(doing, " · ".join(f"{kind} {answered[kind]} of {num}" for kind, num in total.items()))

    def takes(name: str) -> None:
        answered[_kind(name)] += 1
        say()

    say()
    return takes


def _kind(name: str) -> str:
    """Of ``rank 3``, ``rollout engine 1`` or ``reward process``."""
    if name.startswith("rank "):
        return "ranks"
    return "engines" if "engine" in name else "graders"
