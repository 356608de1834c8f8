"""Instructions that can be checked (the idea of IFEval, arXiv 2311.07911): a subject, and how the text must look.

Each row has a ``prompt`` and ``constraints``, which ``rewards/instructions.py`` checks: a list of objects with a
``kind`` and what that kind needs. Subjects and sentences are ours.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gtpo_megatron.config.generated import GeneratedSet
from gtpo_megatron.errors import ConfigError

MOST_CONSTRAINTS = 3

MOST_DRAWS = 100
"""Of the kinds of one row, after which too few of them are said to fit together."""

MOST_REPEATS = 1_000
"""Prompts one after the other that there are already, after which a set has no others."""

SUBJECTS = (
    *("a rainy day", "a small garden", "the sea", "an old bridge", "a market in the morning", "a cat", "a lost key"),
    *("the first snow", "a long train ride", "a bakery", "a football game", "the moon", "a busy kitchen", "an owl"),
    *("a birthday", "a walk in the forest", "a new bicycle", "the night sky", "a quiet library", "a dog", "bees"),
    *("a paper boat", "the city at night", "a mountain hut", "apples", "a letter to a friend", "a farm", "a storm"),
    *("learning to swim", "a violin", "a desert", "the color blue", "a window", "a clock", "an island", "a horse"),
    *("a school day", "winter clothes", "fresh bread", "a picnic", "a river", "the sun", "a robot", "a lighthouse"),
    *("a good book", "the wind", "a cup of tea", "a museum", "an airport", "a painter", "a tree", "a bus driver"),
    *("the smell of coffee", "a chess game", "a summer evening", "a doctor", "rice", "a mirror", "a playground"),
    *("a whale", "a campfire", "a shoe shop", "morning light", "a map", "the weekend", "a spider", "a neighbor"),
    *("a teacher", "the harvest", "a bridge of stone", "a frog", "a radio", "cooking soup", "a castle", "a hat"),
)

OPENINGS = (
    *("Write about", "Tell me about", "Describe", "Write a short text about", "Say something about"),
    *("Explain to a child what is nice about", "Give your thoughts on", "Write a note about"),
)

KEYWORDS = (
    *("water", "light", "friend", "time", "small", "green", "home", "happy", "road", "music", "warm", "window"),
    *("morning", "story", "hand", "stone", "quiet", "paper", "bright", "winter", "garden", "gold", "color", "always"),
)

COMMON_WORDS = ("the", "and", "is", "it", "of", "to", "in", "with")
"""For words that must not be there: a text without one of these needs care."""

STARTS = ("Once upon a time", "I think", "My answer is", "Dear friend", "Good morning", "It was", "In the beginning")
ENDS = ("The end.", "Thank you.", "That is all.", "Good night.", "See you soon.")


@dataclass(frozen=True, slots=True)
class InstructionKind:
    """One kind of constraint.

    Attributes:
        group: two of one group are never combined, nor with a group in ``excludes``.
        draw: function from the row's random numbers to its parameters.
        sentence: function from the parameters to the sentence of the prompt.
        excludes: other groups.
    """

    group: str
    draw: Callable[[random.Random], dict[str, Any]]
    sentence: Callable[[Mapping[str, Any]], str]
    excludes: frozenset[str] = frozenset()


def _number(*numbers: int) -> Callable[[random.Random], dict[str, Any]]:
    return lambda rng: {"num": rng.choice(numbers)}


def _one_of(name: str, texts: tuple[str, ...]) -> Callable[[random.Random], dict[str, Any]]:
    return lambda rng: {name: rng.choice(texts)}


def _plural(num: int, noun: str) -> str:
    return f"{num} {noun}" if num == 1 else f"{num} {noun}s"


_WHOLE_FORM = frozenset({"edge", "form", "comma", "structure"})
"""Of a form that the whole response has, what cannot be asked beside it."""

KINDS: dict[str, InstructionKind] = {
    "max_words": InstructionKind(
        "length", _number(10, 15, 20, 30), lambda p: f"Use at most {_plural(p['num'], 'word')}."
    ),
    "min_words": InstructionKind("length", _number(20, 25, 30), lambda p: f"Use at least {_plural(p['num'], 'word')}."),
    "sentences": InstructionKind(
        "structure", _number(1, 2, 3), lambda p: f"Write exactly {_plural(p['num'], 'sentence')}.", frozenset({"form"})
    ),
    "paragraphs": InstructionKind(
        "structure",
        _number(2, 3),
        lambda p: f"Write exactly {_plural(p['num'], 'paragraph')}, with an empty line between them.",
        frozenset({"form", "length"}),
    ),
    "lowercase": InstructionKind("case", lambda _: {}, lambda _: "Use lowercase letters only.", frozenset({"edge"})),
    "uppercase": InstructionKind("case", lambda _: {}, lambda _: "Use CAPITAL LETTERS only.", frozenset({"edge"})),
    "bullets": InstructionKind(
        "form",
        _number(2, 3),
        lambda p: f"Write exactly {_plural(p['num'], 'bullet point')}, each on a line that begins with *.",
        frozenset({"structure", "edge"}),
    ),
    "numbered": InstructionKind(
        "form",
        _number(2, 3),
        lambda p: f"Write a numbered list of exactly {_plural(p['num'], 'line')}: 1. and so on.",
        frozenset({"structure", "edge"}),
    ),
    "json": InstructionKind("form", lambda _: {}, lambda _: "Answer with a JSON object and nothing else.", _WHOLE_FORM),
    "title": InstructionKind(
        "form",
        lambda _: {},
        lambda _: "Begin with a title in double angular brackets: <<A title>>.",
        _WHOLE_FORM,
    ),
    "quoted": InstructionKind("form", lambda _: {}, lambda _: "Put the whole answer in double quotes.", _WHOLE_FORM),
    "include": InstructionKind("word", _one_of("word", KEYWORDS), lambda p: f"Use the word {p['word']!r}."),
    "exclude": InstructionKind(
        "word", _one_of("word", COMMON_WORDS), lambda p: f"Do not use the word {p['word']!r}.", frozenset({"edge"})
    ),
    "times": InstructionKind(
        "word",
        lambda rng: {"word": rng.choice(KEYWORDS), "num": 2},
        lambda p: f"Use the word {p['word']!r} at least {p['num']} times.",
    ),
    "letter": InstructionKind(
        "letter",
        lambda rng: {"letter": rng.choice("abcdfgklmpuvwy"), "num": rng.choice((2, 3, 4))},
        lambda p: f"The letter {p['letter']!r} must appear at least {p['num']} times.",
    ),
    "start": InstructionKind(
        "edge", _one_of("text", STARTS), lambda p: f'Begin with "{p["text"]}".', frozenset({"case", "form"})
    ),
    "end": InstructionKind(
        "edge",
        _one_of("text", ENDS),
        lambda p: f'End with "{p["text"]}" as the last words.',
        frozenset({"case", "form"}),
    ),
    "no_comma": InstructionKind("comma", lambda _: {}, lambda _: "Do not use commas."),
}
"""The kinds of constraints, by the names that rewards/instructions.py checks them by."""

RARE = ("paragraphs", "lowercase", "uppercase", "json", "quoted", "end")
"""Kinds that SmolLM2-135M-Instruct hardly ever follows at temperature 1 (docs/tasks.md); drawn where asked for."""


def instruction_records(term: GeneratedSet, num: int) -> Iterator[dict[str, object]]:
    """Generates rows whose prompts differ.

    Options: ``kinds`` to draw from, with ``;`` between (all but ``RARE``); ``min_constraints`` and ``max_constraints``
    of a row.

    Raises:
        ConfigError: an option is unknown or has no such value, no ``min_constraints`` of the kinds fit together, or
            there are not so many different prompts.
    """
    options = dict(term.options)
    kinds = _kinds(options.pop("kinds", ";".join(name for name in KINDS if name not in RARE)), term)
    least = _count(options.pop("min_constraints", "1"), "min_constraints", term)
    most = _count(options.pop("max_constraints", str(max(2, least))), "max_constraints", term)
    if options:
        raise ConfigError(
            f"{term}: no option {next(iter(options))!r}; the options are kinds, min_constraints, max_constraints, "
            f"size, seed, weight"
        )
    if least > most:
        raise ConfigError(f"{term}: min_constraints={least} exceeds max_constraints={most}")
    seen: set[str] = set()
    index = repeats = 0
    while len(seen) < num:
        rng = random.Random(f"instructions {term.first_seed + index}")
        chosen = _fitting(rng, kinds, rng.randint(least, most), least)
        if len(chosen) < least:
            raise ConfigError(f"{term}: at most {len(chosen)} of these kinds fit together; min_constraints is {least}")
        record = _record(rng, chosen)
        repeats = repeats + 1 if record["prompt"] in seen else 0
        if repeats > MOST_REPEATS:
            raise ConfigError(f"{term}: has {len(seen)} different prompts; ask for a smaller size")
        if not repeats:
            seen.add(str(record["prompt"]))
            yield record
        index += 1


def _fitting(rng: random.Random, kinds: list[str], wanted: int, least: int) -> list[str]:
    """So many kinds that can be asked together, or fewer where no others fit; at least ``least``, if there are such."""
    best: list[str] = []
    for _ in range(MOST_DRAWS):
        chosen: list[str] = []
        for name in rng.sample(kinds, len(kinds)):
            if len(chosen) < wanted and all(_fit(KINDS[name], KINDS[other]) for other in chosen):
                chosen.append(name)
        best = max(best, chosen, key=len)
        if len(best) >= least:
            break
    return best


def _record(rng: random.Random, chosen: list[str]) -> dict[str, object]:
    constraints = [{"kind": name, **KINDS[name].draw(rng)} for name in chosen]
    asked = " ".join(KINDS[name].sentence(one) for name, one in zip(chosen, constraints, strict=True))
    return {
        "prompt": f"{rng.choice(OPENINGS)} {rng.choice(SUBJECTS)}. {asked}",
        "answer": "",
        "source": "instructions",
        "constraints": constraints,
        "difficulty": {"num_constraints": len(constraints)},
    }


def _fit(one: InstructionKind, other: InstructionKind) -> bool:
    return one.group != other.group and other.group not in one.excludes and one.group not in other.excludes


def _kinds(text: str, term: GeneratedSet) -> list[str]:
    names = [name.strip() for name in text.split(";") if name.strip()]
    unknown = [name for name in names if name not in KINDS]
    if unknown or not names:
        raise ConfigError(f"{term}: kinds={text!r}: expected some of {';'.join(KINDS)}")
    return list(dict.fromkeys(names))


def _count(text: str, name: str, term: GeneratedSet) -> int:
    if text not in tuple(map(str, range(1, MOST_CONSTRAINTS + 1))):
        raise ConfigError(f"{term}: {name}={text!r} must be a number from 1 to {MOST_CONSTRAINTS}")
    return int(text)
