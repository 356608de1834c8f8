"""Writes easy word problems, ``train.jsonl`` and ``heldout.jsonl``: one sum or difference, of numbers up to 18.

No pair of numbers of the held-out problems is in a training problem of the same kind.
"""

import itertools
import json
import random
import sys
from pathlib import Path

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.cli.arguments import options_or_exit
from gtpo_megatron.config.configuration import configuration

ASSETS = Path(__file__).resolve().parent.parent / "recipes" / "assets" / "word_problems"
NUM_TRAIN, NUM_HELDOUT, SEED = 1024, 128, 2508
HELDOUT_SHARE = 0.2
"""Of the pairs of numbers."""

NAMES = ("Tom", "Ann", "Sam", "Mia", "Leo", "Zoe", "Max", "Eva")
THINGS = ("apples", "pens", "books", "coins", "cards", "balls")
INSTRUCTION = "Answer with a number only."

Pair = tuple[bool, int, int]
"""Whether it is a sum, and its numbers."""


def pairs(seed: int) -> tuple[list[Pair], list[Pair]]:
    """The pairs of numbers of training and of held-out problems."""
    numbers = range(1, 10)
    found = [
        *((True, first, second) for first, second in itertools.product(numbers, numbers)),
        *((False, first, second) for first, second in itertools.product(range(2, 19), numbers) if first > second),
    ]
    random.Random(seed).shuffle(found)
    cut = round(HELDOUT_SHARE * len(found))
    return found[cut:], found[:cut]


def problems(choices: list[Pair], count: int, prefix: str, seed: int) -> list[dict[str, object]]:
    """Rows of distinct problems."""
    every = [(pair, name, thing) for pair in choices for name in NAMES for thing in THINGS]
    rows: list[dict[str, object]] = []
    for (is_sum, first, second), name, thing in random.Random(seed).sample(every, count):
        question = (
            f"{name} has {first} {thing} and gets {second} more. How many {thing} does {name} have now?"
            if is_sum
            else f"{name} has {first} {thing} and gives away {second}. How many {thing} are left?"
        )
        rows.append(
            {
                "id": f"word-problems-{prefix}-{len(rows):05d}",
                "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
                "answer": str(first + second if is_sum else first - second),
                "source": "word_problems",
            }
        )
    return rows


@configuration
class Options:
    """What is written.

    Attributes:
        out: folder.
    """

    out: Path = ASSETS


def main() -> None:
    """Writes both files."""
    args = options_or_exit(Options, sys.argv[1:], program="make_word_problems.py", description=__doc__)
    args.out.mkdir(parents=True, exist_ok=True)
    train, heldout = pairs(SEED)
    for name, rows in (
        ("train", problems(train, NUM_TRAIN, "train", SEED)),
        ("heldout", problems(heldout, NUM_HELDOUT, "heldout", SEED)),
    ):
        write_file(args.out / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    print(f"{NUM_TRAIN} training and {NUM_HELDOUT} held-out problems in {args.out}")


if __name__ == "__main__":
    main()
