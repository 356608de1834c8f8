"""The table of known data sets; a new one is an adapter and a line here."""

import difflib

from gtpo_megatron.data.adapters.adapter import Adapter
from gtpo_megatron.data.adapters.columns import AIME24, AIME25, AMC23, MATH500, MINERVA
from gtpo_megatron.data.adapters.dapo_math import DAPO_MATH_17K
from gtpo_megatron.data.adapters.olympiadbench import OLYMPIADBENCH
from gtpo_megatron.errors import ConfigError

ADAPTERS = {
    adapter.name: adapter for adapter in (DAPO_MATH_17K, AIME24, AIME25, MATH500, AMC23, MINERVA, OLYMPIADBENCH)
}
"""By name."""


def adapter_of(name: str) -> Adapter:
    """The adapter of a known data set.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in ADAPTERS:
        close = difflib.get_close_matches(name, ADAPTERS, n=1)
        raise ConfigError(
            f"unknown data set {name!r}{f'; perhaps you meant {close[0]!r}' if close else ''}; known: "
            f"{', '.join(ADAPTERS)}; or give a file: {name}=FILE.jsonl"
        )
    return ADAPTERS[name]
