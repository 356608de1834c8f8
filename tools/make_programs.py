"""Writes the programming task: ``train.jsonl`` and ``heldout.jsonl``, disjoint by program, from one seed.

Each row has ``prompt`` as chat messages, ``tests`` (calls of ``f`` with expected values), ``id`` and ``source``.
"""

import json
import random
import sys
from pathlib import Path

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.cli.arguments import options_or_exit
from gtpo_megatron.config.configuration import configuration
from tools.programs import HIDDEN_INPUTS, SHOWN_INPUTS, Program, prompt_text, sample_program

NUM_TRAIN = 512
NUM_HELDOUT = 256
SEED = 2508
ASSETS = Path(__file__).resolve().parent.parent / "recipes" / "assets" / "programs"


def make_splits(num_train: int, num_heldout: int, seed: int) -> tuple[list[Program], list[Program]]:
    """Training and held-out programs; the held-out ones depend on ``num_heldout`` and ``seed`` only."""
    rng = random.Random(seed)
    found: dict[tuple[int, ...], Program] = {}  # by shown values, so that one prompt is not in both splits
    while len(found) < num_train + num_heldout:
        program = sample_program(rng)
        found.setdefault(tuple(program(x) for x in SHOWN_INPUTS), program)
    programs = list(found.values())
    return programs[num_heldout:], programs[:num_heldout]


def problem_row(program: Program, row_id: str) -> dict[str, object]:
    """One row of the data set; its tests have inputs that the prompt does not show."""
    tests = {"fn_name": "f", "inputs": [[x] for x in HIDDEN_INPUTS], "outputs": [program(x) for x in HIDDEN_INPUTS]}
    return {
        "id": row_id,
        "prompt": [{"role": "user", "content": prompt_text(program)}],
        "tests": tests,
        "source": "programs",
    }


def write_split(path: Path, programs: list[Program], prefix: str) -> None:
    """Writes one JSON object per line."""
    rows = (problem_row(program, f"{prefix}-{index:05d}") for index, program in enumerate(programs))
    write_file(path, "".join(json.dumps(row) + "\n" for row in rows))


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
    """Writes both splits into a folder."""
    args = options_or_exit(Options, sys.argv[1:], program="make_programs.py", description=__doc__)
    train, heldout = make_splits(args.num_train, args.num_heldout, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    write_split(args.out / "train.jsonl", train, "programs-train")
    write_split(args.out / "heldout.jsonl", heldout, "programs-heldout")
    print(f"{len(train)} training and {len(heldout)} held-out problems in {args.out}")


if __name__ == "__main__":
    main()
