"""The batch as the formulas see it: this rank's tokens, flat and without padding, and a table of all responses.

The table is the same on every rank and gives every count that the formulas need: ``d_t``, ``h_t``, ``n``, ``m`` and
the pool sizes.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gtpo_megatron.algorithms.sums import Reduction, exact_sum
from gtpo_megatron.batch import Credit
from gtpo_megatron.branches import Branch
from gtpo_megatron.outcomes import is_correct


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseTable:
    """All ``R`` responses of the batch, on the CPU.

    Attributes:
        group_index: ``[R]`` int64 in [0, num_groups), in ascending order of the labels.
        num_groups: number of prompt groups, including those without any token.
        rewards: ``[R]`` float64, raw outcome rewards.
        is_correct: ``[R]`` bool: the raw reward reaches the threshold and the response has tokens.
        lengths: ``[R]`` int64, the policy's own tokens.
        is_live: ``[R]`` bool: the response has tokens.
        mine: this rank's responses in the table.
    """

    group_index: Tensor
    num_groups: int
    rewards: Tensor
    is_correct: Tensor
    lengths: Tensor
    is_live: Tensor
    mine: slice

    @classmethod
    def of(cls, rows: Tensor, mine: slice) -> "ResponseTable":
        """The table of ``rows`` ``[R, 3]``, which are those of ``table_rows`` of all ranks."""
        labels, coded, bits = rows.reshape(-1, 3).unbind(1)
        distinct, group_index = torch.unique(labels, return_inverse=True)
        lengths = coded // 2
        return cls(
            group_index=group_index,
            num_groups=len(distinct),
            rewards=bits.contiguous().view(torch.float64),
            is_correct=(coded % 2 == 1) & (lengths > 0),
            lengths=lengths,
            is_live=lengths > 0,
            mine=mine,
        )

    @property
    def is_one_sided(self) -> Tensor:
        """``[num_groups]`` bool: the group has no correct or no incorrect response, by raw reward."""
        sides = torch.zeros(self.num_groups, 2, dtype=torch.bool)
        sides[self.group_index[self.is_live], self.is_correct[self.is_live].to(torch.int64)] = True
        return ~sides.all(1)

    def scopes(self, *, spans_batch: bool) -> tuple[Tensor, int]:
        """``[R]`` int64 in [0, K), and ``K``: the group of each response; 0 for all, and 1, if ``spans_batch``."""
        return (torch.zeros_like(self.group_index), 1) if spans_batch else (self.group_index, self.num_groups)

    def sides(self, *, spans_batch: bool) -> tuple[Tensor, int]:
        """``[R]`` int64 in [0, K), and ``K``: O+ of scope ``s`` is ``2 s + 1``, its O- is ``2 s``."""
        scope, count = self.scopes(spans_batch=spans_batch)
        return 2 * scope + self.is_correct, 2 * count


def table_rows(rewards: Tensor, group_ids: Tensor, lengths: Tensor, *, success_threshold: float) -> Tensor:
    """What the table has of each response, as integers that any rank can send: ``[B, 3]`` int64 on the CPU.

    Args:
        rewards: ``[B]``, any real dtype.
        group_ids: ``[B]`` integer labels.
        lengths: ``[B]`` int64, the policy's own tokens.
        success_threshold: lowest reward of a correct response.
    """
    # decided here because the dtype of the rewards is known; sent in the last bit of the length
    outcome = is_correct(rewards, success_threshold=success_threshold).cpu()
    bits = rewards.to(torch.float64).cpu().contiguous().view(torch.int64)
    return torch.stack((group_ids.to(torch.int64).cpu(), 2 * lengths.cpu() + outcome, bits), dim=1)


def own_lengths(response_mask: Tensor) -> Tensor:
    """Number of the policy's own tokens of each response, ``[B]`` int64."""
    return response_mask.sum(1, dtype=torch.int32).to(torch.int64)  # an int64 sum would copy the mask eightfold


class Turns(NamedTuple):
    """The turn of each token, ``[N]`` int64 from 0.

    Attributes:
        number: its turn among those of its response, in the order in which they were sampled.
        depth: number of turns that its turn was sampled after; ``number`` unless its response has branches.
        place: its place in the turn.
    """

    number: Tensor
    depth: Tensor
    place: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class CreditBatch:
    """This rank's ``N`` tokens, those that the policy itself wrote, and the table of all responses.

    Tokens are ordered by response, then by time. An algorithm's ``check``, ``credit`` and ``select`` take it.

    Attributes:
        response_mask: ``[B, T]`` bool, the places of the tokens in the padded batch, in any arrangement.
        row: ``[N]`` int32, the response of each token.
        entropy: ``[N]`` float64, nats, of the old policy; at least 0.
        old_logprobs: ``[N]`` float64, nats; None if they were not given.
        ref_logprobs: ``[N]`` float64, nats, of the reference policy; None if the reward has no part of it.
        teacher_logprobs: ``[N]`` float64, nats, of the teacher; None if they were not given.
        shaped_tokens: ``[N]`` bool, tokens whose entropies are compared; None: all.
        turn_rewards: rewards of the turns of each of this rank's responses; None if they were not given.
        branches: of each of this rank's responses; None: no rank has a response that branches.
        table: all responses of the batch, the same on every rank.
        penalties: ``[R]`` float64, added to each response's reward: for its length, and for its divergence from the
            reference policy.
        reduction: the ranks.
    """

    response_mask: Tensor
    row: Tensor
    entropy: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    teacher_logprobs: Tensor | None
    shaped_tokens: Tensor | None
    turn_rewards: Sequence[Sequence[float]] | None
    branches: Sequence[Sequence[Branch]] | None
    table: ResponseTable
    penalties: Tensor
    reduction: Reduction

    @classmethod
    def of(  # noqa: PLR0913 - tensors of the same rows
        cls,
        response_mask: Tensor,
        table: ResponseTable,
        *,
        entropy: Tensor,
        old_logprobs: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
        teacher_logprobs: Tensor | None = None,
        shaped_tokens: Tensor | None = None,
        turn_rewards: Sequence[Sequence[float]] | None = None,
        branches: Sequence[Sequence[Branch]] | None = None,
        reduction: Reduction | None = None,
    ) -> "CreditBatch":
        """The tokens where ``response_mask`` is True, without penalties."""
        return cls(
            response_mask=response_mask,
            row=torch.repeat_interleave(own_lengths(response_mask)).to(torch.int32),
            entropy=entropy,
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
            teacher_logprobs=teacher_logprobs,
            shaped_tokens=shaped_tokens,
            turn_rewards=turn_rewards,
            branches=branches,
            table=table,
            penalties=torch.zeros_like(table.rewards),
            reduction=reduction or Reduction(),
        )

    @property
    def lengths(self) -> Tensor:
        """``[B]`` int64 on the CPU, number of tokens of each of this rank's responses."""
        return self.table.lengths[self.table.mine]

    @property
    def place(self) -> Tensor:
        """``[N]`` int64, from 0: the number of the policy's own tokens before each in its response."""
        before = torch.cumsum(self.lengths, 0) - self.lengths
        return torch.arange(len(self.row), device=self.row.device).sub_(self.spread(before))

    @property
    def position(self) -> Tensor:
        """``[N]`` int64, ``t`` of the paper, from 0: the number of the policy's own tokens that each was sampled after.

        They are those before it in its response; of one with branches, those before it on its path.
        """
        if not any(self.branches or ()):
            return self.place
        return self._on_path(self.place, self.response_mask.cumsum(1))

    def turns(self) -> Turns:
        """The turns of the tokens.

        A turn is a stretch of the policy's own tokens; between two there is another's, or a branch begins.
        """
        mask = self.response_mask
        begins = mask.clone()
        begins[:, 1:] &= ~mask[:, :-1]
        for row, branches in enumerate(self.branches or ()):
            for start, _ in branches:
                begins[row, start] = mask[row, start]
        columns = torch.arange(mask.shape[1], device=mask.device)
        begun_at = torch.where(begins, columns, 0).cummax(1).values if len(columns) else begins.to(torch.int64)
        begun = begins.cumsum(1)
        number = (begun - 1).masked_select(mask)
        return Turns(number=number, depth=self._on_path(number, begun), place=(columns - begun_at).masked_select(mask))

    def _on_path(self, counts: Tensor, up_to: Tensor) -> Tensor:
        """How many things there are before each token on its path.

        Args:
            counts: ``[N]`` int64, how many there are before it in its response.
            up_to: ``[B, T]`` int64, how many there are in the response up to each place, with it.
        """
        counts = counts.clone()
        ends = torch.cumsum(self.lengths, 0).tolist()
        for row, branches in enumerate(self.branches or ()):
            own, so_far = self.response_mask[row].cumsum(0).tolist(), up_to[row].tolist()
            first = ends[row] - own[-1] if own else 0
            excess = [(0, 0)]  # start of each part, and how many of what is before it there are on other paths
            for start, after in branches:
                known = 0
                if after > 0:
                    known = so_far[after - 1] - next(less for begin, less in reversed(excess) if begin < after)
                excess.append((start, so_far[start - 1] - known))
            for (start, less), (end, _) in itertools.pairwise([*excess, (len(own), 0)]):
                counts[first + (own[start - 1] if start else 0) : first + (own[end - 1] if end else 0)] -= less
        return counts

    def padded(self, values: Tensor) -> Tensor:
        """``[N]`` -> ``[B, T]`` float32, 0 outside the mask."""
        matrix = torch.zeros(self.response_mask.shape, dtype=torch.float32, device=values.device)
        return matrix.masked_scatter_(self.response_mask, values.to(torch.float32))

    def spread(self, values: Tensor) -> Tensor:
        """One value per response of this rank ``[B]`` -> one per token ``[N]``, on the tokens' device."""
        return values.to(self.row.device).index_select(0, self.row)

    def on_tokens(self, values: Tensor) -> Tensor:
        """One value per response of the batch ``[R]`` -> one per token of this rank ``[N]``."""
        return self.spread(values[self.table.mine])

    def takes_part(self, one_sided_groups: Literal["zero", "keep"]) -> Tensor:
        """``[R]`` bool: responses that enter a pool."""
        if one_sided_groups == "keep":
            return self.table.is_live
        return self.table.is_live & ~self.table.is_one_sided[self.table.group_index]

    @property
    def outcome(self) -> Tensor:
        """``[L]`` float64: reward plus penalties (length, reference divergence) of the ``L`` responses with tokens."""
        return (self.table.rewards + self.penalties)[self.table.is_live]

    def group_mean(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Size and mean of each response's group: ``[L]`` float64 -> two ``[L]`` float64.

        Args:
            values: one per response with tokens, such as ``outcome``; every rank holds all of them.
        """
        group = self.table.group_index[self.table.is_live]
        size = torch.bincount(group, minlength=self.table.num_groups)
        mean = exact_sum(values, group, size, Reduction()).mean
        return size[group].to(torch.float64), mean[group]

    def of_responses(self, reward: Tensor, advantage: Tensor, metrics: dict[str, float] | None = None) -> Credit:
        """Credit of responses, repeated on their tokens.

        Args:
            reward: ``[L]`` float64, one per response with tokens, in the table's order.
            advantage: ``[L]`` float64.
            metrics: further metrics, the same on every rank.
        """
        everyone = torch.zeros(2, len(self.table.lengths), dtype=torch.float64)
        everyone[:, self.table.is_live] = torch.stack((reward, advantage))
        return Credit(
            shaped_rewards=self.on_tokens(everyone[0]), advantages=self.on_tokens(everyone[1]), metrics=metrics or {}
        )
