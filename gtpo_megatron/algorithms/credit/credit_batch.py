"""Inputs and outputs of a credit function."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gtpo_megatron.algorithms.batch.reduction import LocalReduction, Reduction
from gtpo_megatron.algorithms.batch.response_table import ResponseTable
from gtpo_megatron.algorithms.batch.tokens import Tokens
from gtpo_megatron.algorithms.exact_sum import exact_sum


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenInputs:
    """This rank's ``N`` tokens: those that the policy itself wrote.

    Attributes:
        tokens: their places in the padded batch.
        entropy: ``[N]`` float64, nats, of the old policy; at least 0.
        old_logprobs: ``[N]`` float64, nats; None if they were not given.
        ref_logprobs: ``[N]`` float64, nats, of the reference policy; None if the reward has no part of it.
        compared: ``[N]`` bool, tokens whose entropies are compared; None: all.
    """

    tokens: Tokens
    entropy: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    compared: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyWeights:
    """``x`` and ``y`` of tokens or of responses, for the metrics.

    Attributes:
        values: ``[M]`` float64, of tokens or of responses.
        is_correct: ``[M]`` bool.
        is_lone: ``[M]`` bool: there is nothing to compare it with.
        reduction: the ranks that hold the others.
    """

    values: Tensor
    is_correct: Tensor
    is_lone: Tensor
    reduction: Reduction


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCredit:
    """Credit of this rank's tokens.

    Attributes:
        shaped_rewards: ``[N]`` float64.
        advantages: ``[N]`` float64.
        weights: what shaped the rewards, if anything did.
    """

    shaped_rewards: Tensor
    advantages: Tensor
    weights: EntropyWeights | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CreditBatch(TokenInputs):
    """This rank's tokens, and the table of all responses.

    Attributes:
        table: all responses of the batch, the same on every rank.
        penalties: ``[R]`` float64, added to each response's reward: for its length, and for its divergence from the
            reference policy.
        reduction: the ranks.
    """

    table: ResponseTable
    penalties: Tensor
    reduction: Reduction

    def takes_part(self, one_sided_groups: Literal["zero", "keep"]) -> Tensor:
        """``[R]`` bool: responses that enter a pool."""
        if one_sided_groups == "keep":
            return self.table.is_live
        return self.table.is_live & ~self.table.is_one_sided[self.table.group_index]

    def on_tokens(self, values: Tensor) -> Tensor:
        """One value per response of the batch ``[R]`` -> one per token of this rank ``[N]``."""
        return self.tokens.spread(values[self.table.mine])

    @property
    def outcome(self) -> Tensor:
        """``[L]`` float64: reward plus penalties of the ``L`` responses with tokens, in the table's order."""
        return (self.table.rewards + self.penalties)[self.table.is_live]

    def group_mean(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Size and mean of each response's group: ``[L]`` float64 -> two ``[L]`` float64.

        Args:
            values: one per response with tokens, such as ``outcome``; every rank holds all of them.
        """
        group = self.table.group_index[self.table.is_live]
        size = torch.bincount(group, minlength=self.table.num_groups)
        mean = exact_sum(values, group, size, LocalReduction()).mean
        return size[group].to(torch.float64), mean[group]

    def of_responses(self, reward: Tensor, advantage: Tensor, weights: EntropyWeights | None = None) -> TokenCredit:
        """Credit of responses, repeated on their tokens.

        Args:
            reward: ``[L]`` float64, one per response with tokens, in the table's order.
            advantage: ``[L]`` float64.
            weights: what shaped the rewards, if anything did.
        """
        everyone = torch.zeros(2, len(self.table.lengths), dtype=torch.float64)
        everyone[:, self.table.is_live] = torch.stack((reward, advantage))
        return TokenCredit(
            shaped_rewards=self.on_tokens(everyone[0]), advantages=self.on_tokens(everyone[1]), weights=weights
        )
