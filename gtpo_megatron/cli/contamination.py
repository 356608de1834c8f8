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
from gtpo_megatron.config.environment import EnvironmentConfig
from gtpo_megatron.config.evaluate import EvaluateConfig
from gtpo_megatron.config.problems import parse_dataset, split_at_commas
from gtpo_megatron.errors import ConfigError


@configuration
class EnvironmentOptions:
    """The environment that the rows are for.

    Attributes:
        name: as for ``evaluate``. It makes its problems of whole rows, so that rows with one prompt are different
            problems where other columns differ. "": none.
    """

    name: str = ""


@configuration
class ContaminationOptions:
    """Looks for the problems of benchmarks in a training set; prints one line per benchmark, or all pairs as JSON.

    Attributes:
        train: training set: a file, or a known name such as dapo-math-17k.
        benchmarks: such as ``aime24,math500=FILE``; commas or blanks between them.
        prompt_column: column of the prompt in benchmarks' rows, if its name is none of the usual ones; known benchmarks
            have theirs.
        answer_column: column of the reference answer in the same rows, likewise.
        training_prompt_column: column of the prompt in ``train``, and, before the usual names, in benchmarks' rows that
            have it.
        training_answer_column: column of the reference answer in ``train``, likewise.
        environment: environment of the rows, if there is one.
        ngram_words: length of the runs of words that are compared.
        json: print every pair as JSON.
    """

    train: Annotated[str, tyro.conf.Positional]
    benchmarks: tuple[str, ...]
    prompt_column: str = ""
    answer_column: str = ""
    training_prompt_column: str = ""
    training_answer_column: str = ""
    environment: EnvironmentOptions = EnvironmentOptions()
    ngram_words: int = 13
    json: bool = False

    @property
    def request(self) -> EvaluateConfig:
        """The evaluation that reads the same rows in the same way.

        Raises:
            ConfigError: a set or an environment has no such name, or there is no benchmark.
        """
        parse_dataset(self.train, "train")
        if not split_at_commas(self.benchmarks):
            raise ConfigError("contamination needs at least one benchmark: --benchmarks aime24,mine=FILE.jsonl")
        return EvaluateConfig(
            benchmarks=self.benchmarks,
            against=self.train,
            prompt_column=self.prompt_column,
            answer_column=self.answer_column,
            training_prompt_column=self.training_prompt_column,
            training_answer_column=self.training_answer_column,
            environment=EnvironmentConfig(name=self.environment.name),
        )


def run(arguments: Sequence[str]) -> int:
    """``contamination TRAIN --benchmarks ...``."""
    options = parse_options(ContaminationOptions, arguments, program="gtpo-megatron contamination")
    request = options.request
    from gtpo_megatron.data.contamination import find_contamination
    from gtpo_megatron.data.unique_rows import load_questions

    assert request.training_set is not None, "train is never empty"
    training = load_questions(request.training_set, whole_rows=request.has_whole_rows)
    found = {
        label: find_contamination(
            training, load_questions(ref, whole_rows=request.has_whole_rows), ngram_words=options.ngram_words
        )
        for label, ref in request.sets.items()
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
