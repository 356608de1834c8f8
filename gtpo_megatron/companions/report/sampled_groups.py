"""Reads sampled groups of a run for a page, each response cut to its first tokens to save memory."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import numpy as np

from gtpo_megatron.branches import Branch
from gtpo_megatron.companions.evaluate.scores import are_correct
from gtpo_megatron.companions.report.packed import packed
from gtpo_megatron.errors import DataError
from gtpo_megatron.run_folder.rollout_log import ROLLOUT_FOLDER, RolloutRecord, iter_rollouts, rollout_files

T = TypeVar("T")

MAX_GROUPS = 64
"""Sampled groups read per run, from steps spread over it, including the first and the last."""
MAX_TOKENS = 1024
"""Tokens kept per response."""
MAX_PROMPT_CHARACTERS = 4_000
MAX_INFO_CHARACTERS, MAX_FURTHER_INFO_CHARACTERS = 1_500, 300
"""Of the first ``NUM_FIRST`` responses of a group and kind, which a page opens with, and of all others."""
MAX_PARTS = 12
"""Parts of a reward that are shown."""
NUM_FIRST = 2


class TokenKind(StrEnum):
    """The outcome of a response."""

    CORRECT = "correct"
    """In ``d_t``."""
    INCORRECT = "incorrect"
    """In ``h_t``."""
    UNGRADED = "ungraded"
    """Without a verdict: in neither."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownResponse:
    """One response; values per token are of its first ``MAX_TOKENS`` tokens, means are over the whole response.

    Attributes:
        kind: outcome of the response.
        truncated: the length limit cut it when it was sampled.
        reward: raw outcome reward.
        parts: parts of the reward by name.
        info: note of the reward function, JSON that may be cut; "" if nothing.
        length: number of tokens that the policy wrote.
        num_tokens: number of all tokens.
        mean_entropy: over the policy's tokens, nats; 0 if there are none.
        mean_advantage: over the policy's tokens; 0 if there are none.
        entropy: entropies of the policy's tokens, nats, as of :func:`packed`.
        tokens: text of all tokens.
        foreign: indices of the tokens that the policy did not write, in ascending order.
        branches: index of the token at which each begins, and end of the tokens that it follows, as of ``Branch``.
        shaped_rewards: shaped rewards of the policy's tokens, packed.
        advantages: advantages of the policy's tokens, packed.
    """

    kind: TokenKind
    truncated: bool
    reward: float
    parts: dict[str, float]
    info: str
    length: int
    num_tokens: int
    mean_entropy: float
    mean_advantage: float
    entropy: bytes
    tokens: list[str]
    foreign: list[int]
    branches: list[Branch]
    shaped_rewards: bytes
    advantages: bytes


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """The responses of one prompt in a step.

    Attributes:
        step: number of the step.
        group_id: label, unique in the run.
        prompt: text of the prompt, at most ``MAX_PROMPT_CHARACTERS``, with an ellipsis if it is cut.
        answer: the reference answer, cut likewise.
        responses: all responses of the group, in the order of sampling.
    """

    step: int
    group_id: int
    prompt: str
    answer: str
    responses: list[ShownResponse]


def read_groups(folder: Path, *, threshold: float) -> tuple[tuple[SampledGroup, ...], str]:
    """Reads groups of the last readable step and of steps spread over earlier ones.

    Args:
        folder: the run folder.
        threshold: lowest reward of a correct response.

    Returns:
        At most ``MAX_GROUPS`` groups by ascending step, and a sentence about unreadable files, or "".
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


@lru_cache(maxsize=4 * MAX_GROUPS)  # so that a live page reads each file once
def _groups_of_file(step: int, path: Path, _state: tuple[int, int], threshold: float) -> Sequence[SampledGroup]:
    return tuple(sampled_groups(step, iter_rollouts(path), threshold=threshold))


def all_groups(folder: Path, *, threshold: float) -> Iterator[SampledGroup]:
    """Every group that a run has written down, one step at a time.

    Args:
        folder: the run folder.
        threshold: lowest reward of a correct response.

    Raises:
        DataError: a file cannot be read.
    """
    for step, path in rollout_files(folder):
        yield from sampled_groups(step, iter_rollouts(path), threshold=threshold, max_groups=sys.maxsize)


def spread(items: Sequence[T], count: int) -> list[T]:
    """At most ``count`` of the items, spread over all of them, including the first.

    Items are ranked by how often 2 divides their index, so the choice changes by one or two items if the list grows by
    one, and a live page reads few new files.
    """
    ranked = sorted(range(len(items)), key=lambda index: (index & -index or 2 * len(items), index), reverse=True)
    return [items[index] for index in sorted(ranked[:count])]


def sampled_groups(
    step: int, records: Iterable[RolloutRecord], *, threshold: float, max_groups: int = MAX_GROUPS
) -> list[SampledGroup]:
    """Collects the groups of a step's records, which are read one by one.

    Args:
        step: number of the step.
        records: records of the step; groups may be mixed.
        threshold: lowest reward of a correct response.
        max_groups: further groups are left out.

    Returns:
        Groups in the order of their first response.
    """
    groups: dict[int, SampledGroup] = {}
    num_of_kind: Counter[tuple[int, TokenKind]] = Counter()
    for record in records:
        if record.group_id not in groups:
            if len(groups) == max_groups:
                continue
            prompt, answer = _cut(record.prompt), _cut(record.answer)
            groups[record.group_id] = SampledGroup(step, record.group_id, prompt, answer, [])
        kind = _kind(record, threshold)
        num_of_kind[record.group_id, kind] += 1
        is_first = num_of_kind[record.group_id, kind] <= NUM_FIRST
        max_info = MAX_INFO_CHARACTERS if is_first else MAX_FURTHER_INFO_CHARACTERS
        groups[record.group_id].responses.append(_shown(record, kind, max_info=max_info))
    return list(groups.values())


def _kind(record: RolloutRecord, threshold: float) -> TokenKind:
    """The outcome of a record."""
    if record.reward_failed:
        return TokenKind.UNGRADED
    return TokenKind.CORRECT if are_correct(record.reward, threshold=threshold) else TokenKind.INCORRECT


def _shown(record: RolloutRecord, kind: TokenKind, *, max_info: int) -> ShownResponse:
    foreign = record.foreign_tokens
    shaped, entropy, advantages = (
        np.delete(np.asarray(values, dtype=np.float64), foreign)
        for values in (record.shaped_rewards, record.token_entropy, record.advantages)
    )
    num_own = max(1, len(entropy))
    shown_tokens = record.tokens[:MAX_TOKENS]
    shown_foreign = [index for index in foreign if index < MAX_TOKENS]
    own = slice(len(shown_tokens) - len(shown_foreign))
    return ShownResponse(
        kind=kind,
        truncated=record.truncated,
        reward=record.reward,
        parts={name: round(part, 4) for name, part in list(record.parts.items())[:MAX_PARTS]},
        info=_cut(record.info, max_info),
        length=len(entropy),
        num_tokens=len(record.tokens),
        mean_entropy=round(float(entropy.sum()) / num_own, 4),
        mean_advantage=round(float(advantages.sum()) / num_own, 4),
        entropy=packed(entropy[own]),
        tokens=[sys.intern(token) for token in shown_tokens],
        foreign=shown_foreign,
        branches=[branch for branch in record.branches if branch.start < MAX_TOKENS],
        shaped_rewards=packed(shaped[own]),
        advantages=packed(advantages[own]),
    )


def _cut(text: str, most: int = MAX_PROMPT_CHARACTERS) -> str:
    return text if len(text) <= most else text[:most] + "…"
