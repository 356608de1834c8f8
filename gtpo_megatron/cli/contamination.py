"""``gtpo-megatron contamination``."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import tyro

from gtpo_megatron.cli.arguments import parse_options
from gtpo_megatron.cli.command import Command
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.config.problems import parse_dataset, parse_datasets, split_at_commas
from gtpo_megatron.errors import ConfigError


@configuration
class ContaminationOptions:
    """Looks for the problems of benchmarks in a training set; prints one line per benchmark, or all pairs as JSON.

    Attributes:
        train: training set: a file, or a known name such as dapo-math-17k.
        benchmarks: such as ``aime24,math500=FILE``; commas or blanks between them.
        ngram_words: length of the runs of words that are compared.
        json: print every pair as JSON.
    """

    train: Annotated[str, tyro.conf.Positional]
    benchmarks: tuple[str, ...]
    ngram_words: int = 13
    json: bool = False


def run(arguments: Sequence[str]) -> int:
    """``contamination TRAIN --benchmarks ...``."""
    options = parse_options(ContaminationOptions, arguments, program="gtpo-megatron contamination")
    refs = parse_datasets(split_at_commas(options.benchmarks), "benchmarks")
    if not refs:
        raise ConfigError("contamination needs at least one benchmark: --benchmarks aime24,mine=FILE.jsonl")
    from gtpo_megatron.data.contamination import find_contamination
    from gtpo_megatron.data.unique_rows import load_questions

    training = load_questions(parse_dataset(options.train, "train"))
    found = {
        ref.label: find_contamination(training, load_questions(ref), ngram_words=options.ngram_words) for ref in refs
    }
    if options.json:
        content = {
            label: {
                "num_problems": one.num_problems,
                "num_exact_only": one.num_exact_only,
                "matches": [asdict(match) for match in one.matches],
            }
            for label, one in found.items()
        }
        sys.stdout.write(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        return 0
    for label, one in found.items():
        sys.stdout.write(f"{label}: {one}\n")
        for match in one.matches:
            kind = "the same question as" if match.is_exact else f"{match.share:.0%} of its n-grams in"
            sys.stdout.write(f"  {match.problem_id}: {kind} {match.train_id}\n")
    return 0


COMMAND = Command(
    usage="""\
  contamination TRAIN --benchmarks aime24,mine=FILE [--json]
                    lists the problems of benchmarks that are in a training set""",
    run=run,
    options=ContaminationOptions,
)
