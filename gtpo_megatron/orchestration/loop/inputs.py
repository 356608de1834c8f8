"""Reads the training and held-out sets, and searches for problems in both."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gtpo_megatron.batch import Problem
from gtpo_megatron.config.environment import EnvironmentConfig
from gtpo_megatron.config.problems import DataConfig, PoolConfig
from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.data.chat_template import TemplateInputs, asks_for_date, stop_token_ids, today, unstopped_turn
from gtpo_megatron.data.contamination import Contamination, find_contamination
from gtpo_megatron.data.problem_pool import ProblemPool
from gtpo_megatron.data.prompt_sampler import PromptSampler
from gtpo_megatron.data.prompts import ProblemSet, RowsNeeded, load_problems
from gtpo_megatron.data.solved_rates import read_rates
from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.evaluation.evaluator import HeldOutSet
from gtpo_megatron.rewards.function import answer_complaint, complaint, needs_answer, run_rewards
from gtpo_megatron.run_folder.folder import TRAIN, DataContent, heldout_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

SHOWN_MATCHES = 3
"""Contaminated problems named at the start of a run; ``gtpo-megatron contamination`` lists all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInputs:
    """What a run works on, read and checked before any process starts.

    Attributes:
        tokenizer: the model's tokenizer.
        train: problems to learn from.
        heldout: sets to measure on.
        template_date: date that the chat template writes; as configured if it does not ask.
        notes: remarks of the reading, for the person who starts the run.
        lost: how many training problems are left out, and which options bring them back; "" if none is.
        contents: content of every data set, by its name in ``data.json``.
        rates: of an evaluation of the training set, by a problem's id: correct responses, and those with a verdict.
    """

    tokenizer: "PreTrainedTokenizerBase"
    train: Sequence[Problem]
    heldout: Sequence[HeldOutSet]
    template_date: str = ""
    notes: Sequence[str] = ()
    lost: str = ""
    contents: Mapping[str, DataContent] = field(default_factory=dict)
    rates: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def read_inputs(config: RunConfig, tokenizer: "PreTrainedTokenizerBase", *, vocab_size: int | None = None) -> RunInputs:
    """Reads all data sets of a run.

    Args:
        config: configuration of the run.
        tokenizer: tokenizer of its model.
        vocab_size: size of the vocabulary of its model; None does not compare token ids with it.

    Raises:
        ConfigError: a data set's name is unknown, or the chat template has no such option.
        DataError: a data set is missing, empty or malformed, or a prompt has a token that the model does not have.
    """
    data, evaluation = config.data, config.evaluation
    given = TemplateInputs(options=data.template_options, date=data.template_date or today())
    graded_by = rows_needed(config.reward, config.environment, drops=data.ungradable_rows == "drop")
    training = load_problems(
        data.train,
        tokenizer,
        max_prompt_tokens=data.max_prompt_tokens,
        verbatim_text=data.verbatim_text,
        template=data.prompt_template,
        graded_by=graded_by,
        given=given,
        vocab_size=vocab_size,
    )
    rates: dict[str, tuple[int, int]] = {}
    if data.pool.verdicts:
        threshold = config.algorithm.success_threshold
        rates = read_rates(
            Path(data.pool.verdicts), content_sha256=training.content_sha256, success_threshold=threshold
        )
        training = _within_rates(training, rates, data.pool)
    notes = [*template_notes(tokenizer, given), *training.notes]
    if warning := turn_warning(config, tokenizer):
        logger.warning(warning)
        notes.append(warning)
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
            given=given,
            vocab_size=vocab_size,
        ).head(evaluation.num_problems)
        notes += found.notes
        contents[heldout_name(label)] = _content(found)
        contamination = find_contamination(training.comparable, found.comparable)
        notes += contamination_notes(label, contamination)
        heldout.append(HeldOutSet(label=label, problems=found.problems, num_contaminated=len(contamination.matches)))
    return RunInputs(
        tokenizer=tokenizer,
        train=training.problems,
        heldout=tuple(heldout),
        template_date=given.date if asks_for_date(tokenizer) else data.template_date,
        notes=tuple(notes),
        lost=_lost(training),
        rates=rates,
        contents=contents,
    )


def prompt_sampler(config: RunConfig, inputs: RunInputs) -> PromptSampler[Problem]:
    """Draws a run's problems, from its beginning."""
    pool = ProblemPool(config.data.pool, config.seed) if config.data.pool.enabled else None
    return PromptSampler(inputs.train, config.seed, pool, inputs.rates)


def _within_rates(training: ProblemSet, rates: Mapping[str, tuple[int, int]], pool: PoolConfig) -> ProblemSet:
    """Without the problems that are solved too seldom or too often; one that was not evaluated is used."""
    names = [problem.problem_id for problem in training.problems]
    is_used = [name not in rates or pool.min_rate <= rates[name][0] / rates[name][1] <= pool.max_rate for name in names]
    if not any(is_used):
        raise DataError(
            f"data.pool: none of {len(names)} problems is solved at a rate from {pool.min_rate:g} to {pool.max_rate:g}"
        )
    num_left, num_unknown = len(names) - sum(is_used), len(set(names) - rates.keys())
    return training.only(
        is_used,
        f"data.pool leaves out {num_left} of {len(names)} training problems, which are not solved at a rate from "
        f"{pool.min_rate:g} to {pool.max_rate:g}; {num_unknown} have no verdict and are used",
    )


def check_enough(data: DataConfig, inputs: RunInputs) -> None:
    """Raises ConfigError if a step needs more problems than there are."""
    if data.prompts_per_step > len(inputs.train):
        lost = f"; {inputs.lost}" if inputs.lost else ""
        if data.pool.verdicts:
            low, high = data.pool.min_rate, data.pool.max_rate
            lost += f"; data.pool leaves out what is not solved at a rate from {low:g} to {high:g}"
        raise ConfigError(
            f"data.prompts_per_step={data.prompts_per_step} exceeds the {len(inputs.train)} usable problems of "
            f"{data.train_path}{lost}"
        )


def _lost(training: ProblemSet) -> str:
    reasons = []
    if training.num_dropped_long:
        reasons.append(
            f"{training.num_dropped_long} have longer prompts than data.max_prompt_tokens, the longest "
            f"{training.longest_prompt} tokens: raise --data.max-prompt-tokens"
        )
    if training.num_ungradable:
        reasons.append(f"{training.num_ungradable} cannot be graded and are dropped (data.ungradable_rows)")
    if training.num_repeated:
        reasons.append(f"{training.num_repeated} repeat an earlier prompt")
    return f"of {training.num_rows} rows {', '.join(reasons)}" if reasons else ""


def template_notes(tokenizer: "PreTrainedTokenizerBase", given: TemplateInputs) -> list[str]:
    """A note about the day that is in every prompt, if the chat template writes one."""
    if not asks_for_date(tokenizer):
        return []
    return [f"the chat template asks for the date and is told {given.date}, as long as this goes on (template_date)"]


def turn_warning(config: RunConfig, tokenizer: "PreTrainedTokenizerBase") -> str:
    """A warning if responses of this run would not end where its chat template ends a turn; else ""."""
    sampling = config.rollout.sampling
    stop_ids = (*stop_token_ids(Path(config.model.path), tokenizer), *sampling.stop_token_ids)
    given = TemplateInputs(options=config.data.template_options)
    return "" if config.data.verbatim_text else unstopped_turn(tokenizer, given, stop_ids, sampling.stop_strings)


def rows_needed(reward: RewardConfig, environment: EnvironmentConfig, *, drops: bool | None) -> RowsNeeded:
    """What the environment, or without one the reward functions, need of a row; for ``drops`` see ``RowsNeeded``."""
    if environment.name:
        from gtpo_megatron.conversations.environment import row_check

        return RowsNeeded(answer=False, complaint=row_check(environment.name), drops=drops, whole_rows=True)
    functions = run_rewards(reward)
    return RowsNeeded(
        answer=needs_answer(functions),
        complaint=lambda columns_json: complaint(functions, columns_json),
        answer_complaint=lambda answer: answer_complaint(functions, answer),
        drops=drops,
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
