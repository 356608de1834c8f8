"""Reads the training and held-out sets, and searches for problems in both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from gtpo_megatron.batch import Problem
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.data.contamination import Contamination, find_contamination
from gtpo_megatron.data.prompts import ProblemSet, RowsNeeded, load_problems
from gtpo_megatron.evaluation.evaluator import HeldOutSet
from gtpo_megatron.rewards.function import RewardFunction, complaint, needs_answer, run_rewards
from gtpo_megatron.run_folder.data_file import TRAIN, DataContent, heldout_name

SHOWN_MATCHES = 3
"""Contaminated problems named at the start of a run; ``gtpo-megatron contamination`` lists all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInputs:
    """What a run works on, read and checked before any process starts.

    Attributes:
        tokenizer: of the model.
        train: problems to learn from.
        heldout: sets to measure on.
        notes: what was noticed while reading, for the person who starts the run.
        contents: of every data set, by its name in ``data.json``.
    """

    tokenizer: PreTrainedTokenizerBase
    train: Sequence[Problem]
    heldout: Sequence[HeldOutSet]
    notes: Sequence[str] = ()
    contents: Mapping[str, DataContent] = field(default_factory=dict)


def read_inputs(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> RunInputs:
    """Reads all data sets of a run.

    Raises:
        ConfigError: a data set's name is unknown.
        DataError: a data set is missing, empty or malformed.
    """
    data, evaluation = config.data, config.evaluation
    graded_by = rows_needed(run_rewards(config.reward), drops=data.ungradable_rows == "drop")
    training = load_problems(
        data.train,
        tokenizer,
        max_prompt_tokens=data.max_prompt_tokens,
        verbatim_text=data.verbatim_text,
        template=data.prompt_template,
        graded_by=graded_by,
    )
    notes = list(training.notes)
    contents = {TRAIN: _content(training)}
    heldout = []
    for label, ref in config.heldout_sets.items():
        found = load_problems(
            ref,
            tokenizer,
            max_prompt_tokens=data.max_prompt_tokens,
            verbatim_text=data.verbatim_text,
            template=evaluation.prompt_template,
            graded_by=graded_by,
        ).head(evaluation.num_problems)
        notes += found.notes
        contents[heldout_name(label)] = _content(found)
        num_contaminated = 0
        if data.contamination_ngram_words:
            contamination = find_contamination(
                training.comparable, found.comparable, ngram_words=data.contamination_ngram_words
            )
            notes += contamination_notes(label, contamination)
            num_contaminated = len(contamination.matches)
        heldout.append(HeldOutSet(label=label, problems=found.problems, num_contaminated=num_contaminated))
    return RunInputs(
        tokenizer=tokenizer, train=training.problems, heldout=tuple(heldout), notes=tuple(notes), contents=contents
    )


def rows_needed(functions: Sequence[RewardFunction], *, drops: bool) -> RowsNeeded:
    """What these reward functions need of a row; ``drops`` leaves out rows that they cannot grade."""
    return RowsNeeded(
        answer=needs_answer(functions), complaint=lambda columns_json: complaint(functions, columns_json), drops=drops
    )


def _content(found: ProblemSet) -> DataContent:
    return DataContent(origin=found.origin, problems=len(found.problems), problems_sha256=found.used_sha256)


def contamination_notes(label: str, contamination: Contamination) -> list[str]:
    """Notes with counts and the first pairs; empty if nothing was found."""
    if not contamination.matches:
        return [f"contamination: {label}: {contamination}"] if contamination.num_exact_only else []
    pairs = [
        f"{match.problem_id} = {match.train_id}" if match.is_exact else f"{match.problem_id} ~ {match.train_id}"
        for match in contamination.matches[:SHOWN_MATCHES]
    ]
    more = ", ..." if len(contamination.matches) > SHOWN_MATCHES else ""
    return [f"contamination: {label}: {contamination}: {', '.join(pairs)}{more}"]
