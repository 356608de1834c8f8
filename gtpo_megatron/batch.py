"""The frozen containers that the stages of a step exchange; each stage adds a type.

::

    Problem -> PromptBatch -(2 rollout)-> RolloutBatch, which stays where it was sampled
    driver:    RolloutHandle, where the responses are -(3 reward)-> RewardBatch
    per rank:  RolloutShard -(4 score)-> ScoredBatch -(5, 6 credit)-> Credit, with it a TrainBatch

``RolloutHandle`` stands in ``orchestration/stages/rollouts.py``, since only the driver and its stages have it.

Shapes: ``B`` responses, ``T`` response tokens (padded on the right), ``Tp`` prompt tokens (padded on the right).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from gtpo_megatron.branches import NOTHING, Branch, Path, check_within, paths
from gtpo_megatron.errors import ShapeError


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One row of a dataset, tokenised.

    Attributes:
        problem_id: unique within its dataset.
        prompt_ids: the rendered prompt, without special padding.
        answer: the reference answer that the reward compares with; empty if the row has none.
        source: name of the dataset the row came from.
        prompt: the prompt before rendering: text, or chat messages with ``role`` and ``content``, and with calls of
            tools and their results as chat templates read them.
        columns_json: the row's other columns as one JSON object, for the reward.
    """

    problem_id: str
    prompt_ids: tuple[int, ...]
    answer: str
    source: str = ""
    prompt: str | tuple[Mapping[str, Any], ...] = ""
    columns_json: str = "{}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptBatch:
    """The prompts of one step; prompt ``n`` is sampled ``group_size`` times.

    Attributes:
        problems: one per prompt.
        group_ids: int64 label of each prompt's group, unique in the run.
    """

    problems: tuple[Problem, ...]
    group_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.problems) != len(self.group_ids):
            raise ShapeError(f"{len(self.problems)} problems but {len(self.group_ids)} group_ids; one label a prompt")


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeResult:
    """An environment's account of a response, so far or at its end.

    Attributes:
        reward: sum of the turns' rewards.
        turn_rewards: reward of each of the policy's turns, discounted; () if turns have no rewards of their own.
        parts: parts of the reward, and counts of what happened, by name.
        failure: reason of a missing reward; "" if there is one.
        refusal: reason of an agent's first refused request; "" if none was refused.
    """

    reward: float = 0.0
    turn_rewards: tuple[float, ...] = ()
    parts: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    refusal: str = ""


def mask_of_lengths(lengths: Tensor, width: int) -> Tensor:
    """``[B, width]`` bool, True on the first ``lengths[i]`` columns of each row; int64 ``[B]``."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutBatch:
    """Sampled responses.

    Attributes:
        prompt_ids: ``[B, Tp]`` int64, right-padded with 0.
        prompt_lengths: ``[B]`` int64.
        response_ids: ``[B, T]`` int64, right-padded with 0: what follows the prompt, whoever wrote it.
        response_lengths: ``[B]`` int64.
        loss_mask: ``[B, T]`` bool, True on the tokens that the policy wrote. The others (tool output, an environment's
            turn) are context only; they are neither scored nor trained on.
        rollout_logprobs: ``[B, T]`` float32, nats, of the sampling distribution; 0 outside ``loss_mask``.
        group_ids: ``[B]`` int64.
        truncated: ``[B]`` bool, True if the length limit cut the response.
        policy_version: version of the weights that generated all tokens; with ``token_versions``, the oldest one.
        token_entropy: ``[B, T]`` float32, nats over the full vocabulary, by the sampler; 0 outside ``loss_mask``. None
            if the sampler was not asked for it.
        token_versions: ``[B, T]`` int64, policy version that generated each token, non-decreasing along a response;
            undefined outside ``loss_mask``. None if ``policy_version`` generated all tokens.
        routed_experts: ``[N, M, k]`` uint8 or int16: the experts that the sampler's ``M`` routers sent each of its
            ``N`` tokens to, in the order of the router. Rows follow one another without padding, each with the tokens
            that the sampler has run: all of prompt and response but the last (:attr:`routed_lengths`). None if the
            sampler was not asked for it.
        branches: of each response, where its tokens do not follow those before them; () if none has a branch.
        results: the environment's account of each response; () without an environment, and once rewards are made of it.
    """

    prompt_ids: Tensor
    prompt_lengths: Tensor
    response_ids: Tensor
    response_lengths: Tensor
    loss_mask: Tensor
    rollout_logprobs: Tensor
    group_ids: Tensor
    truncated: Tensor
    policy_version: int
    token_entropy: Tensor | None = None
    token_versions: Tensor | None = None
    routed_experts: Tensor | None = None
    branches: tuple[tuple[Branch, ...], ...] = ()
    results: tuple[EpisodeResult, ...] = ()

    def __post_init__(self) -> None:
        batch = self.response_ids.shape[0]
        for name in ("prompt_lengths", "response_lengths", "group_ids", "truncated"):
            if getattr(self, name).shape != (batch,):
                raise ShapeError(f"{name}: got shape {tuple(getattr(self, name).shape)}, expected ({batch},)")
        if self.rollout_logprobs.shape != self.response_ids.shape or self.prompt_ids.shape[:1] != (batch,):
            raise ShapeError(
                f"response_ids {tuple(self.response_ids.shape)}, rollout_logprobs {tuple(self.rollout_logprobs.shape)} "
                f"and prompt_ids {tuple(self.prompt_ids.shape)} disagree on the number of responses or tokens"
            )
        if self.loss_mask.shape != self.response_ids.shape or self.loss_mask.dtype != torch.bool:
            raise ShapeError(
                f"loss_mask {tuple(self.loss_mask.shape)} {self.loss_mask.dtype}, response_ids "
                f"{tuple(self.response_ids.shape)}: one bool a token is needed"
            )
        if bool((self.loss_mask & ~self.response_mask).any()):
            raise ShapeError("loss_mask: True outside a response; the policy can only have written response tokens")
        self._check_extras()

    def _check_extras(self) -> None:
        """What not every sampler is asked for."""
        if self.token_entropy is not None and self.token_entropy.shape != self.response_ids.shape:
            raise ShapeError(
                f"token_entropy {tuple(self.token_entropy.shape)}, response_ids {tuple(self.response_ids.shape)}: "
                f"one entropy a token is needed"
            )
        if self.token_versions is not None and self.token_versions.shape != self.response_ids.shape:
            raise ShapeError(
                f"token_versions {tuple(self.token_versions.shape)}, response_ids {tuple(self.response_ids.shape)}: "
                f"one version a token is needed"
            )
        for name in ("results", "branches"):
            if (found := getattr(self, name)) and len(found) != self.num_responses:
                raise ShapeError(f"{name} of {len(found)} responses, expected {self.num_responses}")
        for row, (branches, length) in enumerate(zip(self.branches, self.response_lengths.tolist(), strict=False)):
            check_within(branches, length)
            if wrong := [start for start, after in branches if after == NOTHING and self.loss_mask[row, start]]:
                raise ShapeError(f"a branch at {wrong[0]} follows nothing and begins with the policy's token, {row=}")
        if self.routed_experts is not None:
            num_run = int(self.routed_lengths.sum())
            if self.routed_experts.ndim != 3 or len(self.routed_experts) != num_run:
                raise ShapeError(
                    f"routed_experts {tuple(self.routed_experts.shape)}: expected [{num_run}, routers, k], "
                    f"a row for every token of prompts and responses but the last of each"
                )

    @property
    def routed_lengths(self) -> Tensor:
        """``[B]`` int64, tokens that the sampler has run: nothing was sampled after the last one."""
        return self.prompt_lengths + self.response_lengths - 1

    def paths(self, row: int) -> tuple[Path, ...]:
        """The sequences of a response: one, unless it has branches."""
        return paths(int(self.response_lengths[row]), self.branches[row] if self.branches else ())

    def sequence_lengths(self, row: int) -> tuple[int, ...]:
        """Tokens of each of :meth:`paths`, with the prompt if it has that."""
        prompt = int(self.prompt_lengths[row])
        return tuple(path.num_tokens + prompt * path.has_prompt for path in self.paths(row))

    @property
    def sequence_tokens(self) -> Tensor:
        """``[B]`` int64, tokens of all sequences of each response: what a pass reads."""
        tokens = self.prompt_lengths + self.response_lengths
        for row, branches in enumerate(self.branches):
            if branches:
                tokens[row] = sum(self.sequence_lengths(row))
        return tokens

    @property
    def num_responses(self) -> int:
        """``B``."""
        return int(self.response_ids.shape[0])

    @property
    def response_mask(self) -> Tensor:
        """``[B, T]`` bool, True on response tokens, whoever wrote them; left-aligned."""
        return mask_of_lengths(self.response_lengths, self.response_ids.shape[1])

    @property
    def own_lengths(self) -> Tensor:
        """``[B]`` int64, tokens that the policy wrote."""
        return self.loss_mask.sum(1)

    @property
    def oldest_versions(self) -> Tensor:
        """``[B]`` int64, policy version of the weights that generated each response's first token."""
        if self.token_versions is None or self.token_versions.shape[1] == 0:
            return torch.full((self.num_responses,), self.policy_version)
        first = self.loss_mask.to(torch.uint8).argmax(1, keepdim=True)
        return self.token_versions.gather(1, first)[:, 0]

    @property
    def is_multi_version(self) -> Tensor:
        """``[B]`` bool, True if several versions of the weights generated the response."""
        if self.token_versions is None:
            return torch.zeros(self.num_responses, dtype=torch.bool)
        is_newer = (self.token_versions != self.oldest_versions[:, None]) & self.loss_mask
        return is_newer.any(dim=1)

    def select(self, rows: Sequence[int]) -> "RolloutBatch":
        """The responses at ``rows``, padding trimmed to the longest."""
        return take_rows([self], [(0, row) for row in rows])


def take_rows(
    batches: Sequence[RolloutBatch], places: Sequence[tuple[int, int]], *, may_mix: bool = False
) -> RolloutBatch:
    """Gathers rows of several batches into one batch, padding trimmed to the longest.

    Each chosen row is copied once.

    Args:
        batches: at least one, also if no row is taken: they determine whether the result has entropies.
        places: batch and row of each row of the result.
        may_mix: allow batches of different policy versions; the result then has ``token_versions``.

    Raises:
        ShapeError: no batch, different policy versions, or only some batches have the sampler's entropies or routing,
            or an environment's results.
    """
    _check_fit(batches, may_mix=may_mix)
    found: list[tuple[list[int], list[int]]] = [([], []) for _ in batches]
    for target, (batch, row) in enumerate(places):
        found[batch][0].append(target)
        found[batch][1].append(row)
    chosen = [(_index(targets), _index(rows)) for targets, rows in found]

    def per_row(columns: Sequence[Tensor]) -> Tensor:
        taken = columns[0].new_empty(len(places))
        for column, (targets, rows) in zip(columns, chosen, strict=True):
            taken[targets] = column[rows]
        return taken

    def per_token(matrices: Sequence[Tensor], lengths: Tensor, padding: int = 0) -> Tensor:
        width = int(lengths.max()) if len(lengths) else 0
        taken = matrices[0].new_full((len(places), width), padding)
        for matrix, (targets, rows) in zip(matrices, chosen, strict=True):
            taken[targets, : matrix.shape[1]] = matrix[rows, :width]
        return taken

    def column(name: str) -> Tensor:
        return per_row([getattr(batch, name) for batch in batches])

    def matrix(name: str, lengths: Tensor) -> Tensor:
        return per_token([getattr(batch, name) for batch in batches], lengths)

    oldest = min(batch.policy_version for batch in batches)
    is_mixed = any(batch.token_versions is not None or batch.policy_version != oldest for batch in batches)
    has_entropy = batches[0].token_entropy is not None
    prompt_lengths, response_lengths = column("prompt_lengths"), column("response_lengths")
    return RolloutBatch(
        prompt_ids=matrix("prompt_ids", prompt_lengths),
        prompt_lengths=prompt_lengths,
        response_ids=matrix("response_ids", response_lengths),
        response_lengths=response_lengths,
        loss_mask=matrix("loss_mask", response_lengths),
        rollout_logprobs=matrix("rollout_logprobs", response_lengths),
        group_ids=column("group_ids"),
        truncated=column("truncated"),
        policy_version=oldest,
        token_entropy=matrix("token_entropy", response_lengths) if has_entropy else None,
        token_versions=per_token([_token_versions(batch) for batch in batches], response_lengths, padding=oldest)
        if is_mixed
        else None,
        routed_experts=_take_routed(batches, places),
        branches=tuple(batches[batch].branches[row] if batches[batch].branches else () for batch, row in places)
        if any(batch.branches for batch in batches)
        else (),
        results=tuple(batches[batch].results[row] for batch, row in places)
        if any(batch.results for batch in batches)
        else (),
    )


def _take_routed(batches: Sequence[RolloutBatch], places: Sequence[tuple[int, int]]) -> Tensor | None:
    """``[N, M, k]`` of the chosen rows, one after the other."""
    routed = [batch.routed_experts for batch in batches]
    if routed[0] is None:
        return None
    ends = [[0, *batch.routed_lengths.cumsum(0).tolist()] for batch in batches]
    chosen = [routed[batch][ends[batch][row] : ends[batch][row + 1]] for batch, row in places]  # type: ignore[index]
    return torch.cat(chosen) if chosen else routed[0][:0]


def _index(rows: list[int]) -> slice | Tensor:
    """Consecutive rows as a slice, which indexes without a copy."""
    if rows and rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows, dtype=torch.int64)


def _check_fit(batches: Sequence[RolloutBatch], *, may_mix: bool) -> None:
    versions = {batch.policy_version for batch in batches}
    if not versions or (len(versions) > 1 and not may_mix):
        raise ShapeError(f"batches of policy versions {sorted(versions)}: exactly one is needed")
    if len({batch.token_entropy is not None for batch in batches}) != 1:
        raise ShapeError("some batches carry the sampler's entropies and some do not")
    if len({batch.routed_experts is not None for batch in batches}) != 1:
        raise ShapeError("some batches carry the sampler's routing and some do not")
    if len({bool(batch.results) for batch in batches if batch.num_responses}) > 1:
        raise ShapeError("some batches carry an environment's results and some do not")


def _token_versions(batch: RolloutBatch) -> Tensor:
    if batch.token_versions is not None:
        return batch.token_versions
    return torch.full_like(batch.response_ids, batch.policy_version)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutShard:
    """The responses of a rollout batch that one data-parallel replica holds.

    Attributes:
        rollouts: the responses.
        global_rows: their rows in the whole batch.
        prompt_groups: every group of the whole batch in order; the same on all ranks.
        policy_version: oldest version that generated a token of the whole batch; the same on all ranks.
    """

    rollouts: RolloutBatch
    global_rows: tuple[int, ...]
    prompt_groups: tuple[int, ...]
    policy_version: int

    @classmethod
    def of(cls, whole: RolloutBatch, rows: Sequence[int]) -> "RolloutShard":
        """The shard with these rows of ``whole``."""
        return cls(
            rollouts=whole.select(rows),
            global_rows=tuple(rows),
            prompt_groups=tuple(dict.fromkeys(whole.group_ids.tolist())),
            policy_version=whole.policy_version,
        )


ENVIRONMENT_SECONDS, ENVIRONMENT_WAIT = "environment_s", "environment_wait_s"
"""Parts that are times, in which two runs of one seed differ: of its calls, and in which the engine sampled nothing."""

REQUESTS_REFUSED, REQUESTS_UNENFORCED, ENDED_UNGRADED = "requests_refused", "requests_unenforced", "ended_ungraded"
BRANCHES = "branches"
"""Parts that are counted: an agent's refused requests, those that asked for what is not enforced, 1 of an episode that
a limit ended before its reward, and turns that did not go on from the one before them, of an episode with such."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardBatch:
    """Outcome rewards, one per response.

    Attributes:
        rewards: ``[B]`` float32, raw outcome reward.
        failed: ``[B]`` bool, True if the reward function raised or timed out; the reward then has no meaning.
        num_over_budget: number of failed rows that were not graded because the batch's time was used up.
        parts: ``[B]`` float32 by name: parts of the reward that the function stated; NaN for rows without it.
        info: what the function said about each response, as a JSON object or ""; empty if it said nothing of any.
        turn_rewards: what each turn of a response earned, which adds up to its reward; empty without an environment.
        failures: number of failed rows by reason, of the most frequent reasons.
    """

    rewards: Tensor
    failed: Tensor
    num_over_budget: int = 0
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    info: tuple[str, ...] = ()
    turn_rewards: tuple[tuple[float, ...], ...] = ()
    failures: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rewards.shape != self.failed.shape or self.rewards.ndim != 1:
            raise ShapeError(
                f"rewards {tuple(self.rewards.shape)}, failed {tuple(self.failed.shape)}: both must be [B]"
            )
        for name, part in self.parts.items():
            if part.shape != self.rewards.shape:
                raise ShapeError(
                    f"part {name!r} {tuple(part.shape)}, rewards {tuple(self.rewards.shape)}: both are [B]"
                )
        for what, found in (("texts of info", self.info), ("responses' rewards of turns", self.turn_rewards)):
            if found and len(found) != len(self.rewards):
                raise ShapeError(f"{len(found)} {what} for {len(self.rewards)} rewards: one each, or none")

    @property
    def commonest_failure(self) -> str:
        """The most frequent reason of missing verdicts, such as ``31 x KeyError: 'score'``; empty if none is known."""
        if not self.failures:
            return ""
        reason = max(self.failures, key=self.failures.__getitem__)
        return f"{self.failures[reason]} x {reason}"

    def select(self, rows: Sequence[int]) -> "RewardBatch":
        """The rewards of these responses; ``num_over_budget`` and ``failures`` are those of the whole batch."""
        index = torch.tensor(rows, dtype=torch.int64)
        return RewardBatch(
            rewards=self.rewards[index],
            failed=self.failed[index],
            num_over_budget=self.num_over_budget,
            parts={name: part[index] for name, part in self.parts.items()},
            info=tuple(self.info[row] for row in rows) if self.info else (),
            turn_rewards=tuple(self.turn_rewards[row] for row in rows) if self.turn_rewards else (),
            failures=self.failures,
        )

    @classmethod
    def joined(cls, batches: Sequence["RewardBatch"]) -> "RewardBatch":
        """Several batches as one, in their order; a part that one lacks is NaN there."""
        names = dict.fromkeys(name for batch in batches for name in batch.parts)
        return cls(
            rewards=torch.cat([batch.rewards for batch in batches]),
            failed=torch.cat([batch.failed for batch in batches]),
            num_over_budget=sum(batch.num_over_budget for batch in batches),
            parts={
                name: torch.cat([batch.parts.get(name, torch.full_like(batch.rewards, torch.nan)) for batch in batches])
                for name in names
            },
            info=tuple(text for batch in batches for text in (batch.info or ("",) * len(batch.rewards)))
            if any(batch.info for batch in batches)
            else (),
            turn_rewards=tuple(turns for batch in batches for turns in batch.turn_rewards),
            failures=dict(sum((Counter(batch.failures) for batch in batches), Counter())),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredBatch(RolloutShard):
    """A rank's responses with the old policy's scores; only ranks with logits (the last pipeline stage) have it.

    Attributes:
        old_logprobs: ``[B, T]`` float32, nats; 0 outside ``rollouts.loss_mask``. By the trainer, or by the sampler
            without a scoring pass.
        token_entropy: ``[B, T]`` float32, nats over the full vocabulary; 0 outside ``rollouts.loss_mask``.
        ref_logprobs: ``[B, T]`` float32, nats, of the same tokens under the reference policy; 0 outside
            ``rollouts.loss_mask``. None if the run has none.
        teacher_logprobs: likewise, under the teacher.
        scored_version: policy version of the weights that computed them.
    """

    old_logprobs: Tensor
    token_entropy: Tensor
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    scored_version: int

    def __post_init__(self) -> None:
        if self.old_logprobs.shape != self.token_entropy.shape or self.old_logprobs.ndim != 2:
            raise ShapeError(
                f"old_logprobs {tuple(self.old_logprobs.shape)}, token_entropy {tuple(self.token_entropy.shape)}: "
                f"both must be [B, T]"
            )
        for name in ("ref_logprobs", "teacher_logprobs"):
            if (found := getattr(self, name)) is not None and found.shape != self.old_logprobs.shape:
                raise ShapeError(
                    f"{name} {tuple(found.shape)}, old_logprobs {tuple(self.old_logprobs.shape)}: "
                    f"one value a token is needed"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Credit:
    """Shaped rewards and advantages of this rank's tokens, computed before the first update.

    ``assign_credit`` returns them as ``[B, T]`` float32, zero outside the mask; an algorithm's ``credit`` function,
    which sees no padding, as ``[N]`` float64.

    Attributes:
        shaped_rewards: what each token earned.
        advantages: the same standardised; no gradient.
        metrics: statistics of the whole batch, the same on every rank; see ``algorithms.credit.diagnostics``.
    """

    shaped_rewards: Tensor
    advantages: Tensor
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch(ScoredBatch):
    """A rank's responses, ready for updates.

    Attributes:
        shaped_rewards: see ``Credit``.
        advantages: see ``Credit``.
        loss_mask: ``[B, T]`` bool, the tokens that enter the loss: those that the policy wrote, or fewer.
    """

    shaped_rewards: Tensor
    advantages: Tensor
    loss_mask: Tensor

    def select(self, rows: Sequence[int]) -> "TrainBatch":
        """The responses at ``rows``, padding trimmed to the longest, without the sampler's routing."""
        index = torch.tensor(rows, dtype=torch.int64)
        rollouts = replace(self.rollouts, routed_experts=None).select(rows)
        width = rollouts.response_ids.shape[1]
        changes: dict[str, Any] = {
            name: value[index, :width] for name, value in fields_of(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **changes, rollouts=rollouts, global_rows=tuple(self.global_rows[row] for row in rows))


def fields_of(record: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, from which a later stage makes its own record."""
    return {one.name: getattr(record, one.name) for one in fields(record)}
