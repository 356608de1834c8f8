"""Sampled groups of a run, as much of them as a page shows.

A response of 16,384 tokens takes megabytes as Python numbers and a page shows its first 1,024, so a response is cut
while it is read, and nothing longer is kept than the one that is being read.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gtpo_megatron.errors import DataError
from gtpo_megatron.observability.correctness import are_correct
from gtpo_megatron.run_folder.rollout_log import ROLLOUT_FOLDER, RolloutRecord, iter_rollouts, rollout_files

T = TypeVar("T")

MAX_GROUPS = 64
"""Sampled groups read of a run: from steps spread over all of it, the first and the last among them."""
MAX_TOKENS = 1024
"""Of a response, kept one by one."""
MAX_PROMPT_CHARACTERS = 4_000
MAX_TEXTS_OF_A_KIND = 2
"""Responses of a group and kind whose tokens are kept; entropies are kept of all."""
SIGNIFICANT_DIGITS = 3
"""Of the numbers kept of every token."""


Floats = np.ndarray[Any, np.dtype[np.float64]]


class Kind(StrEnum):
    """Which side of its group a response is on."""

    CORRECT = "correct"
    """In ``d_t``."""
    INCORRECT = "incorrect"
    """In ``h_t``."""
    UNJUDGED = "unjudged"
    """The reward function gave no verdict: in neither, as in the algorithm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownResponse:
    """One response; lists hold what its first ``MAX_TOKENS`` tokens have, means are of the whole response.

    Attributes:
        kind: by its verdict.
        truncated: the length limit cut it when it was sampled.
        reward: raw outcome reward.
        length: tokens of the whole response that the policy wrote.
        num_tokens: of the whole response, whoever wrote them.
        mean_entropy: over the policy's tokens, nats; 0 if there are none.
        mean_advantage: likewise.
        entropy: of the policy's tokens, nats.
        tokens: whoever wrote them; None but for the first ``MAX_TEXTS_OF_A_KIND`` of a group and kind.
        foreign: indices of the tokens that the policy did not write, in ascending order.
        shaped_rewards: of the policy's tokens; None without ``tokens``.
        advantages: likewise.
    """

    kind: Kind
    truncated: bool
    reward: float
    length: int
    num_tokens: int
    mean_entropy: float
    mean_advantage: float
    entropy: list[float]
    tokens: list[str] | None
    foreign: list[int] | None
    shaped_rewards: list[float] | None
    advantages: list[float] | None


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """The responses of one prompt, as a step saw them.

    Attributes:
        step: number of the step.
        group_id: label, unique in the run.
        prompt: at most ``MAX_PROMPT_CHARACTERS``, with an ellipsis where it is cut.
        answer: the reference answer, cut likewise.
        responses: of the whole group, in the order they were sampled.
    """

    step: int
    group_id: int
    prompt: str
    answer: str
    responses: list[ShownResponse]


def read_groups(folder: Path, *, threshold: float) -> tuple[tuple[SampledGroup, ...], str]:
    """Groups of the last readable step and of steps spread over those before it.

    Args:
        folder: of the run.
        threshold: least reward of a correct response.

    Returns:
        ``MAX_GROUPS`` groups at most by ascending step, and a sentence on files that cannot be read; empty if all can.
    """
    files = rollout_files(folder)
    num_files, unreadable = len(files), []

    def groups_of(step: int, path: Path) -> Sequence[SampledGroup]:
        try:
            state = path.stat()
            return _groups_of_file(step, path, (state.st_mtime_ns, state.st_size), threshold)
        except (DataError, OSError) as error:
            unreadable.append(str(error))
            return ()

    chosen: list[SampledGroup] = []
    while files and not chosen:
        chosen += groups_of(*files.pop())
    num_more = (MAX_GROUPS - len(chosen)) // max(1, len(chosen))
    for step, path in spread(files, num_more):
        chosen += groups_of(step, path)[: MAX_GROUPS - len(chosen)]
    remark = unreadable[0] if unreadable else ""
    if len(unreadable) > 1:
        remark = f"{len(unreadable)} of {num_files} files in {ROLLOUT_FOLDER}/ cannot be read. The first: {remark}"
    return tuple(sorted(chosen, key=lambda group: group.step)), remark


@lru_cache(maxsize=4 * MAX_GROUPS)  # a page that follows a run reads no file twice
def _groups_of_file(step: int, path: Path, _state: tuple[int, int], threshold: float) -> Sequence[SampledGroup]:
    return tuple(sampled_groups(step, iter_rollouts(path), threshold=threshold))


def spread(items: Sequence[T], count: int) -> list[T]:
    """``count`` of the items at most, spread over all of them, the first among them.

    An item ranks by how often 2 divides its index, later ones first among equals. So a list that has grown by one
    keeps all of the choice but one or two, and a page that follows a run reads as few files anew.
    """
    ranked = sorted(range(len(items)), key=lambda index: (index & -index or 2 * len(items), index), reverse=True)
    return [items[index] for index in sorted(ranked[:count])]


def sampled_groups(
    step: int, records: Iterable[RolloutRecord], *, threshold: float, max_groups: int = MAX_GROUPS
) -> list[SampledGroup]:
    """The groups among the records of a step, taking one record at a time.

    Args:
        step: its number.
        records: groups may be mixed.
        threshold: least reward of a correct response.
        max_groups: further ones are left out.

    Returns:
        Groups in the order of their first response.
    """
    groups: dict[int, SampledGroup] = {}
    num_texts: Counter[tuple[int, Kind]] = Counter()
    for record in records:
        if record.group_id not in groups:
            if len(groups) == max_groups:
                continue
            prompt, answer = _cut(record.prompt), _cut(record.answer)
            groups[record.group_id] = SampledGroup(step, record.group_id, prompt, answer, [])
        kind = _kind(record, threshold)
        num_texts[record.group_id, kind] += 1
        has_text = num_texts[record.group_id, kind] <= MAX_TEXTS_OF_A_KIND
        groups[record.group_id].responses.append(_shown(record, kind, has_text=has_text))
    return list(groups.values())


def shortened(values: Floats) -> list[float]:
    """To ``SIGNIFICANT_DIGITS``; whole numbers as integers, which take less room as text."""
    short = [float(f"{value:.{SIGNIFICANT_DIGITS}g}") for value in values.tolist()]
    return [int(value) if value.is_integer() else value for value in short]


def _kind(record: RolloutRecord, threshold: float) -> Kind:
    """By verdict first: a response without one has a reward that means nothing."""
    if record.reward_failed:
        return Kind.UNJUDGED
    return Kind.CORRECT if are_correct(record.reward, threshold=threshold) else Kind.INCORRECT


def _shown(record: RolloutRecord, kind: Kind, *, has_text: bool) -> ShownResponse:
    foreign = record.foreign_tokens
    shaped, entropy, advantages = (
        np.delete(np.asarray(values, dtype=np.float64), foreign)
        for values in (record.shaped_rewards, record.token_entropy, record.advantages)
    )
    num_own = max(1, len(entropy))
    return ShownResponse(
        kind=kind,
        truncated=record.truncated,
        reward=record.reward,
        length=len(entropy),
        num_tokens=len(record.tokens),
        mean_entropy=round(float(entropy.sum()) / num_own, 4),
        mean_advantage=round(float(advantages.sum()) / num_own, 4),
        entropy=shortened(entropy[:MAX_TOKENS]),
        tokens=[sys.intern(token) for token in record.tokens[:MAX_TOKENS]] if has_text else None,
        foreign=[index for index in foreign if index < MAX_TOKENS] if has_text else None,
        shaped_rewards=shortened(shaped[:MAX_TOKENS]) if has_text else None,
        advantages=shortened(advantages[:MAX_TOKENS]) if has_text else None,
    )


def _cut(text: str) -> str:
    return text if len(text) <= MAX_PROMPT_CHARACTERS else text[:MAX_PROMPT_CHARACTERS] + "…"
