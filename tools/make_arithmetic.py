"""Writes the arithmetic task: ``train.jsonl`` and ``heldout.jsonl``, disjoint by expression, from one seed.

``train_hard.jsonl`` and ``heldout_hard.jsonl`` are those of their problems that have the most terms.
``solutions.jsonl`` and ``heldout_solutions.jsonl`` are the first problems of each with worked solutions, for a warm
start: two terms at a time, so that a model which has learnt to leap unlearns it.

Each row has the schema that real data sets are read with: ``prompt`` as chat messages, ``answer``, ``id``, ``source``.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.cli.arguments import options_or_exit
from gtpo_megatron.config.configuration import configuration
from tools.arithmetic import (
    ArithmeticTask,
    Expression,
    canonical,
    evaluate,
    prompt_text,
    sample_expression,
    sample_solution,
)

NUM_TRAIN = 4096
NUM_HELDOUT = 512
NUM_SOLUTIONS, NUM_HELDOUT_SOLUTIONS = 1024, 128
SEED = 2508
ASSETS = Path(__file__).resolve().parent.parent / "recipes" / "assets" / "arithmetic"


def distinct_expressions(task: ArithmeticTask, seed: int) -> Iterator[Expression]:
    """Yields endless expressions that differ by more than the order of terms and factors."""
    rng = random.Random(seed)
    seen = set()
    while True:
        expression = sample_expression(task, rng)
        key = canonical(expression)
        if key not in seen:
            seen.add(key)
            yield expression


def problem_row(expression: Expression, row_id: str) -> dict[str, object]:
    """One row of the data set."""
    return {
        "id": row_id,
        "prompt": [{"role": "user", "content": prompt_text(expression)}],
        "answer": str(evaluate(expression)),
        "source": "arithmetic",
    }


def write_split(path: Path, expressions: list[Expression], prefix: str) -> None:
    """Writes one JSON object per line."""
    rows = (problem_row(expression, f"{prefix}-{index:05d}") for index, expression in enumerate(expressions))
    write_file(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_solutions(path: Path, expressions: list[Expression], seed: int) -> None:
    """Writes conversations of a problem and a worked solution, one JSON object per line."""
    rng = random.Random(f"{seed}/{path.name}")
    rows = []
    for expression in expressions:
        said = [("user", prompt_text(expression)), ("assistant", sample_solution(expression, rng, leap_rate=0.0))]
        rows.append({"messages": [{"role": role, "content": content} for role, content in said]})
    write_file(path, "".join(json.dumps(row) + "\n" for row in rows))


def make_splits(num_train: int, num_heldout: int, seed: int) -> tuple[list[Expression], list[Expression]]:
    """Training and held-out expressions; the held-out ones depend on ``num_heldout`` and ``seed`` only."""
    stream = distinct_expressions(ArithmeticTask(), seed)
    heldout = [next(stream) for _ in range(num_heldout)]
    return [next(stream) for _ in range(num_train)], heldout


def hard(expressions: list[Expression]) -> list[Expression]:
    """The expressions with the maximum number of terms."""
    return [expression for expression in expressions if len(expression) == ArithmeticTask().max_terms]


@configuration
class Options:
    """What is written.

    Attributes:
        out: folder.
        num_train: training problems.
        num_heldout: held-out problems.
        seed: of both.
    """

    out: Path = ASSETS
    num_train: int = NUM_TRAIN
    num_heldout: int = NUM_HELDOUT
    seed: int = SEED


def main() -> None:
    """Writes both splits, whole, hard and solved, into a folder."""
    args = options_or_exit(Options, sys.argv[1:], program="make_arithmetic.py", description=__doc__)
    train, heldout = make_splits(args.num_train, args.num_heldout, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    write_split(args.out / "train.jsonl", train, "arithmetic-train")
    write_split(args.out / "heldout.jsonl", heldout, "arithmetic-heldout")
    write_split(args.out / "train_hard.jsonl", hard(train), "arithmetic-train-hard")
    write_split(args.out / "heldout_hard.jsonl", hard(heldout), "arithmetic-heldout-hard")
    write_solutions(args.out / "solutions.jsonl", train[:NUM_SOLUTIONS], args.seed)
    write_solutions(args.out / "heldout_solutions.jsonl", heldout[:NUM_HELDOUT_SOLUTIONS], args.seed)
    print(f"{len(train)} training and {len(heldout)} held-out problems in {args.out}")


if __name__ == "__main__":
    main()
