"""Rows of generated data sets, and of mixtures of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from gtpo_megatron.config.generated import INSTRUCTIONS, REASONING_GYM, GeneratedSet, shares
from gtpo_megatron.config.reasoning_task import gym_version
from gtpo_megatron.data.instructions import instruction_records
from gtpo_megatron.data.reasoning_tasks import task_records

_RECORDS: dict[str, Callable[[GeneratedSet, int], Iterator[Mapping[str, object]]]] = {
    REASONING_GYM: task_records,
    INSTRUCTIONS: instruction_records,
}


def generated_records(terms: Sequence[GeneratedSet]) -> Iterator[tuple[str, object]]:
    """Generates the rows of a set with their places, which count from 1 in each of a mixture.

    A mixture is evenly mixed, so that its first rows have the shares of the whole.

    Raises:
        ConfigError, DataError: as the generators.
    """
    nums = shares(terms)
    sources = [_RECORDS[term.generator](term, num) for term, num in zip(terms, nums, strict=True)]
    taken = [0] * len(terms)
    while any(count < num for count, num in zip(taken, nums, strict=True)):
        at = min(range(len(terms)), key=lambda one: (taken[one] + 0.5) / nums[one])
        taken[at] += 1
        yield f"{terms[at].name}, row {taken[at]}", next(sources[at])


def generated_origin(terms: Sequence[GeneratedSet]) -> str:
    """The sets by name, with the version of the package that generates them.

    Raises:
        ConfigError: the package is not installed.
    """
    version = f" (version {gym_version()})" if terms[0].generator == REASONING_GYM else ""
    return " + ".join(map(str, terms)) + version
