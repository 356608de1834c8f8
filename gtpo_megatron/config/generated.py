"""Data sets that a program writes, by name: tasks of reasoning-gym, and instructions that can be checked."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote, unquote

from gtpo_megatron.errors import ConfigError

REASONING_GYM = "reasoning-gym"
INSTRUCTIONS = "instructions"

OWN_REWARDS = {
    REASONING_GYM: "gtpo_megatron.rewards.reasoning_gym:task_score",
    INSTRUCTIONS: "gtpo_megatron.rewards.instructions:all_followed",
}
"""The reward function that grades the rows of each generator."""

OWN_THRESHOLD = 1.0
"""Reward from which a response is correct, by all of them."""

_FORM = re.compile(r"(?P<generator>reasoning-gym|instructions)(?::(?P<task>[^?]*))?(?:\?(?P<options>.*))?", re.DOTALL)
_BEGINNING = re.compile(rf"(?:{REASONING_GYM}|{INSTRUCTIONS})\s*(?:$|[:?+])")
_PLUS = re.compile(rf"\s*\+\s*(?={REASONING_GYM}:|{INSTRUCTIONS}(?:$|[:?+\s]))")
_OPTION = re.compile(r"[a-z]\w*(?:\.\w+)*")
_SAFE = " []\"'{}().:/*-<>"  # in an option's value, as it is written out; what separates options is not

MAX_SIZE = 1_000_000
"""Rows of one set; :meth:`GeneratedSet.first_seed` keeps the rows of two seeds apart by as many."""

MAX_SEED = 4_000
"""``MAX_SEED * MAX_SIZE`` is below 2**32, the largest seed that numpy takes."""


MAX_WEIGHT = 1_000_000
"""So that the sum of weights is finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedSet:
    """One generated set, or one of several in a mixture.

    Attributes:
        generator: ``reasoning-gym`` or ``instructions``.
        task: task of reasoning-gym; empty for instructions.
        size: number of rows; in a mixture with weights, they share the sum of the sizes.
        seed: seed of the rows.
        weight: share in a mixture; None if none was given.
        options: options of the task, as text.
    """

    generator: str
    task: str = ""
    size: int = 500
    seed: int = 0
    weight: float | None = None
    options: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """The task, or the generator if it has one only."""
        return self.task or self.generator

    @property
    def first_seed(self) -> int:
        """Seed of the first row; row ``i`` has this plus ``i``, as reasoning-gym counts.

        Were it ``seed`` itself, the seeds 1 and 2 would have all rows but one in common.
        """
        return self.seed * MAX_SIZE

    def __str__(self) -> str:
        """A form that :func:`parse_generated` reads."""
        task = f":{self.task}" if self.task else ""
        weight = (("weight", repr(self.weight).removesuffix(".0")),) if self.weight is not None else ()
        given = (("size", str(self.size)), ("seed", str(self.seed)), *weight, *self.options)
        return f"{self.generator}{task}?" + "&".join(f"{name}={quote(value, safe=_SAFE)}" for name, value in given)


def is_generated(text: str) -> bool:
    """Whether a text begins as the name of a generated set."""
    return _BEGINNING.match(text) is not None


def parse_generated(text: str, field: str) -> tuple[GeneratedSet, ...]:
    """Reads ``reasoning-gym:NAME?size=2000&min_terms=2``, ``instructions?seed=1``, or several with `` + `` between.

    Args:
        text: the text of an option; values may have ``%2B`` and the like.
        field: name of the option, for errors.

    Raises:
        ConfigError: it has another form, or a mixture is of two generators.
    """
    terms = tuple(_term(part.strip(), f"{field}={text!r}") for part in _PLUS.split(text))
    if len({term.generator for term in terms}) > 1:
        raise ConfigError(f"{field}={text!r}: mixes {REASONING_GYM} with {INSTRUCTIONS}, which are graded differently")
    return terms


def shares(terms: Sequence[GeneratedSet]) -> tuple[int, ...]:
    """Rows of each set of a mixture.

    Without weights these are the sizes. If a set has a weight (the others have 1), the sum of the sizes is divided by
    them, with at least one row each.
    """
    if all(term.weight is None for term in terms):
        return tuple(term.size for term in terms)
    weights = [1.0 if term.weight is None else term.weight for term in terms]
    total = sum(term.size for term in terms)
    return tuple(max(1, round(total * weight / sum(weights))) for weight in weights)


def own_reward(sets: Sequence[tuple[GeneratedSet, ...]]) -> str:
    """The reward function of generated sets; "" unless all rows are of one generator.

    Args:
        sets: parts of each data set; empty for one that is not generated.
    """
    generators = {term.generator for terms in sets for term in terms}
    return OWN_REWARDS[generators.pop()] if len(generators) == 1 and all(sets) else ""


def _term(text: str, where: str) -> GeneratedSet:
    found = _FORM.fullmatch(text)
    if found is None:
        raise ConfigError(f"{where}: {text!r} is no generated set; write each in full: {REASONING_GYM}:NAME?size=1000")
    generator, task = found["generator"], found["task"]
    if generator == REASONING_GYM and not re.fullmatch(r"\w+", task or ""):
        raise ConfigError(f"{where}: expected {REASONING_GYM}:NAME, such as {REASONING_GYM}:chain_sum?size=1000")
    if generator == INSTRUCTIONS and task is not None:
        raise ConfigError(f"{where}: {INSTRUCTIONS} has no parts; write {INSTRUCTIONS}?size=1000")
    options = options_of(found["options"] or "", where)
    return GeneratedSet(
        generator=generator,
        task=task or "",
        size=_whole(options.pop("size", "500"), "size", where, least=1, most=MAX_SIZE),
        seed=_whole(options.pop("seed", "0"), "seed", where, least=0, most=MAX_SEED),
        weight=_weight(options.pop("weight", None), where),
        options=tuple(sorted(options.items())),
    )


def options_of(text: str, where: str) -> dict[str, str]:
    """Reads ``NAME=VALUE&NAME=VALUE``; values may be percent-encoded.

    Raises:
        ConfigError: it has another form, or a name is there twice.
    """
    options: dict[str, str] = {}
    for part in filter(None, text.split("&")):
        name, equals, value = part.partition("=")
        if not (equals and _OPTION.fullmatch(name.strip())):
            raise ConfigError(f"{where}: {part!r} is no option; expected NAME=VALUE, with & between")
        if name.strip() in options:
            raise ConfigError(f"{where}: {name.strip()} is given twice")
        options[name.strip()] = unquote(value.strip())
    return options


def _whole(text: str, name: str, where: str, *, least: int, most: int) -> int:
    if not re.fullmatch(r"\d{1,9}", text) or not least <= int(text) <= most:
        raise ConfigError(f"{where}: {name}={text!r} must be a whole number from {least} to {most}")
    return int(text)


def _weight(text: str | None, where: str) -> float | None:
    if text is None:
        return None
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight <= MAX_WEIGHT:
        raise ConfigError(f"{where}: weight={text!r} must be a number above 0, of at most {MAX_WEIGHT:,}")
    return weight
