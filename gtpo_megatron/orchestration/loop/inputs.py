"""Reads the training and the held-out sets, and looks for problems that are in both."""

from transformers import PreTrainedTokenizerBase

from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.data.contamination import Contamination, find_contamination
from gtpo_megatron.data.prompts import ProblemSet, load_problems
from gtpo_megatron.evaluation.evaluator import HeldOutSet
from gtpo_megatron.orchestration.loop.controller import RunInputs
from gtpo_megatron.run_folder.data_file import TRAIN, DataContent, heldout_name

SHOWN_MATCHES = 3
"""Contaminated problems that are named at the start of a run; ``gtpo-megatron contamination`` lists all."""


def read_inputs(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> RunInputs:
    """Reads all data sets of a run.

    Raises:
        ConfigError: an unknown data set.
        DataError: a data set is missing, empty or malformed.
    """
    data, evaluation = config.data, config.evaluation
    training = load_problems(
        data.train, tokenizer, max_prompt_tokens=data.max_prompt_tokens, verbatim_text=data.verbatim_text
    )
    notes = list(training.notes)
    contents = {TRAIN: _content(training)}
    heldout = []
    for label, ref in evaluation.sets.items():
        found = load_problems(
            ref,
            tokenizer,
            max_prompt_tokens=data.max_prompt_tokens,
            verbatim_text=data.verbatim_text,
            template=evaluation.prompt_template,
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


def _content(found: ProblemSet) -> DataContent:
    return DataContent(origin=found.origin, problems=len(found.problems), problems_sha256=found.used_sha256)


def contamination_notes(label: str, contamination: Contamination) -> list[str]:
    """A count, and the first pairs; nothing where all were compared and nothing was found."""
    if not contamination.matches:
        return [f"contamination: {label}: {contamination}"] if contamination.num_exact_only else []
    pairs = [
        f"{match.problem_id} = {match.train_id}" if match.is_exact else f"{match.problem_id} ~ {match.train_id}"
        for match in contamination.matches[:SHOWN_MATCHES]
    ]
    more = ", ..." if len(contamination.matches) > SHOWN_MATCHES else ""
    return [f"contamination: {label}: {contamination}: {', '.join(pairs)}{more}"]
