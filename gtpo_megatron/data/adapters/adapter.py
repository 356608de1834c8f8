"""What an adapter is: where a data set lives, and how one of its records becomes a row."""

from collections.abc import Callable
from dataclasses import dataclass

from gtpo_megatron.data.hub import HubPlace
from gtpo_megatron.data.rows import Row


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """One known data set.

    Attributes:
        name: lower case; what users write.
        hub: where it is published.
        to_row: ``(record, place, source)`` to a checked row; ``source`` is the name of the data set.
        num_problems: different problems that the pinned revision has; another number is reported.
    """

    name: str
    hub: HubPlace
    to_row: Callable[[object, str, str], Row]
    num_problems: int
