"""Fixes what a run reads of the world: commits of hub data sets that it is given by name, and the date of prompts."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from gtpo_megatron.config.default_reward import run_with_default_reward
from gtpo_megatron.config.problems import parse_dataset
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.config.sft import SftConfig
from gtpo_megatron.data.source import lacks_commit, pinned


def pin_data_sets(config: RunConfig, before: RunConfig | None) -> RunConfig:
    """The configuration with a commit in the name of every data set of the hub, and the reward of generated rows.

    Generated sets get their size and seed into their names.

    Args:
        config: as it was asked for.
        before: of the run that is continued; its commits and date are taken again. None: the newest ones.

    Raises:
        DataError: a commit is not known, see :func:`~gtpo_megatron.data.source.newest_commit`.
    """
    fixed = _fixing([] if before is None else _names(before))
    data, evaluation = config.data, config.evaluation
    fixed_sets = replace(
        config,
        data=replace(
            data,
            train_path=fixed(data.train_path, "train_path"),
            template_date=data.template_date or ("" if before is None else before.data.template_date),
        ),
        evaluation=replace(
            evaluation,
            path=fixed(evaluation.path, "path"),
            benchmarks=tuple(fixed(text, "benchmarks") for text in evaluation.benchmarks),
        ),
    )
    return run_with_default_reward(fixed_sets)


def pin_conversations(config: SftConfig, before: SftConfig | None) -> SftConfig:
    """The same for a warm start.

    Raises:
        DataError: as :func:`pin_data_sets`.
    """
    fixed = _fixing([] if before is None else [before.data.train_path, before.data.heldout_path])
    data = config.data
    return replace(
        config,
        data=replace(
            data,
            train_path=fixed(data.train_path, "train_path"),
            heldout_path=fixed(data.heldout_path, "heldout_path"),
            template_date=data.template_date or ("" if before is None else before.data.template_date),
        ),
    )


def _fixing(earlier: Sequence[str]) -> Callable[[str, str], str]:
    """Takes a data set's name and its field, and gives the name with a commit: that of ``earlier``, if it is there."""
    known = {_without_commit(text): text for text in earlier if text.strip()}

    def fixed(text: str, field: str) -> str:
        found = parse_dataset(text, field) if text.strip() else None
        if found is not None and found.generated:
            return str(found)
        if found is None or not lacks_commit(found):
            return text
        return known.get(_without_commit(text)) or pinned(text, field)

    return fixed


def pin_date(config: RunConfig, date: str) -> RunConfig:
    """The configuration with the date that its prompts were rendered with; "" where they have none."""
    return replace(config, data=replace(config.data, template_date=date))


def _names(config: RunConfig) -> list[str]:
    return [config.data.train_path, config.evaluation.path, *config.evaluation.benchmarks]


def _without_commit(text: str) -> str:
    """The same data set at no commit, in one spelling."""
    return str(replace(parse_dataset(text, "data set"), revision=""))
