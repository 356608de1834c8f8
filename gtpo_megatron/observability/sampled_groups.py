"""Sampled groups, as much of them as a page shows: cut while they are read, with sums over what is cut off.

A response of 16,384 tokens takes megabytes as Python numbers and a page shows its first 1,024, so nothing longer is
kept than the response that is being read. What a report says about whole responses comes from sums.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from gtpo_megatron.observability.correctness import are_correct
from gtpo_megatron.observability.rollout_log import RolloutRecord

MAX_TOKENS = 1024
"""Of a response, kept one by one."""
MAX_PROMPT_CHARACTERS = 4_000
MAX_TEXTS_OF_A_KIND = 2
"""Responses of a group and kind whose tokens are kept; entropies are kept of all."""
SIGNIFICANT_DIGITS = 3
"""Of the numbers kept of every token."""

Floats = np.ndarray[Any, np.dtype[np.float64]]
_POWERS = np.array([float(f"1e{exponent}") for exponent in range(23)])
"""Those powers of ten that float64 holds exactly."""


class Kind(StrEnum):
    """Which side of its group a response is on."""

    CORRECT = "correct"
    """In ``d_t``."""
    INCORRECT = "incorrect"
    """In ``h_t``."""
    UNJUDGED = "unjudged"
    """The reward function gave no verdict: in neither, as in the algorithm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseText:
    """The tokens of a response with their numbers.

    Attributes:
        tokens: the first ``MAX_TOKENS``, whoever wrote them.
        foreign: indices of those that the policy did not write.
        num_tokens: of the whole response, whoever wrote them.
        shaped_rewards: one for each of the policy's first ``MAX_TOKENS`` tokens.
        advantages: likewise.
        mean_entropy: over the policy's tokens of the whole response, nats; 0 if there are none.
        mean_advantage: likewise.
    """

    tokens: Sequence[str]
    foreign: Sequence[int]
    num_tokens: int
    shaped_rewards: Sequence[float]
    advantages: Sequence[float]
    mean_entropy: float
    mean_advantage: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledResponse:
    """One response.

    Attributes:
        kind: by its verdict.
        truncated: the length limit cut it when it was sampled.
        reward: raw outcome reward.
        length: tokens of the whole response that the policy wrote.
        entropy: of the first ``MAX_TOKENS`` of them, nats.
        text: None but for the first ``MAX_TEXTS_OF_A_KIND`` of a group and kind.
    """

    kind: Kind
    truncated: bool
    reward: float
    length: int
    entropy: Sequence[float]
    text: ResponseText | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSums:
    """Sums over all tokens that the policy wrote in a group's responses of one kind, whole responses.

    Attributes:
        num_responses: that have tokens.
        count_at: tokens at each position.
        entropy_at: sum of their entropies at each position, nats.
        tokens: the different tokens.
        counts: occurrences of each.
        entropies: sum over its occurrences, nats.
        weights: sum of ``|advantage|`` over its occurrences.
    """

    num_responses: int
    count_at: Floats
    entropy_at: Floats
    tokens: Sequence[str]
    counts: Floats
    entropies: Floats
    weights: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledGroup:
    """The responses of one prompt, as a step saw them.

    Attributes:
        step: number of the step.
        group_id: label, unique in the run.
        prompt: at most ``MAX_PROMPT_CHARACTERS``, with an ellipsis where it is cut.
        answer: the reference answer, cut likewise.
        responses: of the whole group, in the order they were sampled.
        sums: of the kinds that it has.
    """

    step: int
    group_id: int
    prompt: str
    answer: str
    responses: Sequence[SampledResponse]
    sums: Mapping[Kind, TokenSums]


def sampled_groups(
    step: int, records: Iterable[RolloutRecord], *, threshold: float, max_groups: int
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
    builders: dict[int, _GroupBuilder] = {}
    for record in records:
        if record.group_id not in builders:
            if len(builders) == max_groups:
                continue
            builders[record.group_id] = _GroupBuilder(step, record)
        builders[record.group_id].add(record, kind_of(record, threshold))
    return [builder.group() for builder in builders.values()]


def kind_of(record: RolloutRecord, threshold: float) -> Kind:
    """By verdict first: a response without one has a reward that means nothing."""
    if record.reward_failed:
        return Kind.UNJUDGED
    return Kind.CORRECT if are_correct(record.reward, threshold=threshold) else Kind.INCORRECT


def shortened(values: Sequence[float] | Floats) -> list[float]:
    """To ``SIGNIFICANT_DIGITS``; whole numbers as integers, which take less room as text.

    Scaling by a power of ten that float64 holds exactly gives the number nearest to the short decimal, so that its text
    is short too. Below 1e-20 digits are lost, and further below everything.
    """
    numbers = np.asarray(values, dtype=np.float64)
    with np.errstate(divide="ignore"):  # of 0
        decimals = SIGNIFICANT_DIGITS - 1 - np.floor(np.log10(np.abs(numbers)))
    up, down = (_POWERS[np.clip(places, 0, len(_POWERS) - 1).astype(np.int64)] for places in (decimals, -decimals))
    short = np.rint(numbers * up / down) * down / up
    is_whole = short == np.trunc(short)
    listed: list[float] = short.tolist()
    if not is_whole.any():
        return listed
    return [int(value) if whole else value for value, whole in zip(listed, is_whole.tolist(), strict=True)]


def padded_sum(parts: Sequence[Floats]) -> Floats:
    """Sum of vectors of different lengths, as if the shorter ones ended in zeros."""
    total = np.zeros(max((len(part) for part in parts), default=0))
    for part in parts:
        total[: len(part)] += part
    return total


class _GroupBuilder:
    """Collects the responses of one group."""

    def __init__(self, step: int, first: RolloutRecord) -> None:
        self._step = step
        self._group_id, self._prompt, self._answer = first.group_id, _cut(first.prompt), _cut(first.answer)
        self._responses: list[SampledResponse] = []
        self._sums: dict[Kind, _SumsBuilder] = {}
        self._num_texts: dict[Kind, int] = defaultdict(int)

    def add(self, record: RolloutRecord, kind: Kind) -> None:
        foreign = record.foreign_tokens
        shaped, entropy, advantages = (
            np.delete(np.asarray(values, dtype=np.float64), foreign)
            for values in (record.shaped_rewards, record.token_entropy, record.advantages)
        )
        text = None
        if self._num_texts[kind] < MAX_TEXTS_OF_A_KIND:
            self._num_texts[kind] += 1
            text = ResponseText(
                tokens=[sys.intern(token) for token in record.tokens[:MAX_TOKENS]],
                foreign=[index for index in foreign if index < MAX_TOKENS],
                num_tokens=len(record.tokens),
                shaped_rewards=shortened(shaped[:MAX_TOKENS]),
                advantages=shortened(advantages[:MAX_TOKENS]),
                mean_entropy=float(entropy.mean()) if len(entropy) else 0.0,
                mean_advantage=float(advantages.mean()) if len(advantages) else 0.0,
            )
        self._responses.append(
            SampledResponse(
                kind=kind,
                truncated=record.truncated,
                reward=record.reward,
                length=len(entropy),
                entropy=shortened(entropy[:MAX_TOKENS]),
                text=text,
            )
        )
        if len(entropy):
            own = record.tokens
            if foreign:
                left_out = set(foreign)
                own = [token for index, token in enumerate(own) if index not in left_out]
            self._sums.setdefault(kind, _SumsBuilder()).add(own, entropy, np.abs(advantages))

    def group(self) -> SampledGroup:
        return SampledGroup(
            step=self._step,
            group_id=self._group_id,
            prompt=self._prompt,
            answer=self._answer,
            responses=tuple(self._responses),
            sums={kind: builder.sums() for kind, builder in self._sums.items()},
        )


class _SumsBuilder:
    """Adds up responses of one kind."""

    def __init__(self) -> None:
        self._num_responses = 0
        self._count_at = self._entropy_at = self._counts = self._entropies = self._weights = np.zeros(0)
        self._index: dict[str, int] = {}

    def add(self, tokens: Sequence[str], entropy: Floats, weight: Floats) -> None:
        index = self._index
        for token in dict.fromkeys(tokens):
            index.setdefault(token, len(index))
        labels = np.fromiter(map(index.__getitem__, tokens), np.int64, len(tokens))
        self._num_responses += 1
        self._count_at = padded_sum([self._count_at, np.ones(len(tokens))])
        self._entropy_at = padded_sum([self._entropy_at, entropy])
        self._counts = padded_sum([self._counts, np.bincount(labels).astype(np.float64)])
        self._entropies = padded_sum([self._entropies, np.bincount(labels, entropy).astype(np.float64)])
        self._weights = padded_sum([self._weights, np.bincount(labels, weight).astype(np.float64)])

    def sums(self) -> TokenSums:
        return TokenSums(
            num_responses=self._num_responses,
            count_at=self._count_at,
            entropy_at=self._entropy_at,
            tokens=[sys.intern(token) for token in self._index],
            counts=self._counts,
            entropies=self._entropies,
            weights=self._weights,
        )


def _cut(text: str) -> str:
    return text if len(text) <= MAX_PROMPT_CHARACTERS else text[:MAX_PROMPT_CHARACTERS] + "…"
