"""What a credit function is given, and what it returns."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from gtpo_megatron.algorithms.batch.reduction import KeyReduction, Reduction
from gtpo_megatron.algorithms.batch.response_table import ResponseTable
from gtpo_megatron.algorithms.batch.tokens import Tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenInputs:
    """This rank's ``N`` tokens: those that the policy itself wrote.

    Attributes:
        tokens: where they are.
        entropy: ``[N]`` float64, nats, of the policy that sampled them; at least ``LOWEST_ENTROPY``.
        old_logprobs: ``[N]`` float64, nats; None if they were not given.
        compared: ``[N]`` bool, tokens whose entropy is compared with others'; None: all.
    """

    tokens: Tokens
    entropy: Tensor
    old_logprobs: Tensor | None = None
    compared: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CreditBatch(TokenInputs):
    """This rank's tokens and a few numbers of all responses.

    Attributes:
        table: all responses of the batch, the same on every rank.
        penalties: ``[R]`` float64, length penalty of each response.
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
        return self.tokens.of_response(values[self.table.mine])


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Weights relative to their peers' mean, for the metrics.

    Attributes:
        values: ``[M]`` float64, of tokens or of responses.
        is_correct: ``[M]`` bool.
        is_lone: ``[M]`` bool: there is nothing to compare it with.
        reduction: the ranks that hold the others.
    """

    values: Tensor
    is_correct: Tensor
    is_lone: Tensor
    reduction: KeyReduction


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCredit:
    """What each token of this rank earned.

    Attributes:
        shaped_rewards: ``[N]`` float64.
        advantages: ``[N]`` float64.
        shares: what shaped the rewards, if anything did.
    """

    shaped_rewards: Tensor
    advantages: Tensor
    shares: Shares | None = None
