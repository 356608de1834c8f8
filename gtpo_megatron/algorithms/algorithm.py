"""The record that describes an algorithm to the trainer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor

from gtpo_megatron.algorithms.credit.credit_batch import CreditBatch, TokenCredit, TokenInputs
from gtpo_megatron.algorithms.losses.clipped_surrogate import clip_metrics
from gtpo_megatron.algorithms.losses.denominators import Denominator
from gtpo_megatron.algorithms.losses.loss_inputs import LossInputs
from gtpo_megatron.algorithms.losses.loss_terms import SumCount
from gtpo_megatron.algorithms.losses.selection import SelectionBatch
from gtpo_megatron.config.algorithm import AlgorithmConfig

CreditFunction: TypeAlias = Callable[[Any, CreditBatch], TokenCredit]
LossFunction: TypeAlias = Callable[[Any, LossInputs], Tensor]


def _all_tokens(config: AlgorithmConfig) -> Denominator:  # noqa: ARG001 - the signature of ``Algorithm.denominator``
    return Denominator()


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """One algorithm. The first argument of each of its functions is the configuration.

    A built-in algorithm is an entry of ``registry.BUILT_IN``. Anyone else's is a value at the top level of the module
    of its configuration class, under any name; see docs/your_own_algorithm.md.

    Attributes:
        config: its configuration class; the type of a run's configuration selects the algorithm.
        about: one line with the paper.
        credit: computes shaped rewards and advantages. Sums over responses or tokens must use ``exact_sum``, so that
            the result does not depend on the sharding.
        loss: the loss of each token ``[B, T]``, or of each response ``[B]``; values outside the mask are ignored.
        ratio_of: ``response``: ``loss`` returns one value per response.
        denominator: what the sum of the losses is divided by.
        select: selects tokens of the whole batch, ``[N]`` bool, before it is cut into micro-batches; ``loss`` reads
            them from ``LossInputs.selection``. None: no selection.
        needs_rollout_logprobs: ``loss`` reads the log-probs of the sampler.
        metrics: further statistics of the loss, by ``policy/...`` name.
        takes_shaping_mask: the credit accepts a shaping mask.
        check: raises if this rank's values cannot be used; the error reaches all ranks. Its last argument is ``[B]``
            bool, which responses are correct.
    """

    config: type[AlgorithmConfig]
    about: str
    credit: CreditFunction
    loss: LossFunction
    ratio_of: Literal["token", "response"] = "token"
    denominator: Callable[[Any], Denominator] = _all_tokens
    select: Callable[[Any, SelectionBatch], Tensor] | None = None
    needs_rollout_logprobs: bool = False
    metrics: Callable[[Any, LossInputs], dict[str, SumCount]] = clip_metrics
    takes_shaping_mask: bool = False
    check: Callable[[Any, TokenInputs, Tensor], None] | None = None
