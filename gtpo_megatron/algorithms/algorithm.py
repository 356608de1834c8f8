"""An algorithm is one value: everything that the trainer asks of it, in one record."""

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


def _all_tokens(config: AlgorithmConfig) -> Denominator:  # noqa: ARG001 - other algorithms look at it
    return Denominator()


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """Everything about one algorithm. Each function is given the configuration first.

    A built-in algorithm is an entry of ``registry.BUILT_IN``. Anyone else's is a value at the top level of the module
    of its configuration class, under any name; see docs/your_own_algorithm.md.

    Attributes:
        config: its configuration class; a run of this class is a run of this algorithm.
        about: what it is, with its paper, in a line.
        credit: rewards and entropies to shaped rewards and advantages. What it adds over responses or tokens goes
            through ``exact_sum``, so that the result does not depend on the ranks.
        loss: the loss of each token ``[B, T]``, or of each response ``[B]``; what is outside the mask is ignored.
        ratio_of: ``response``: ``loss`` returns one value per response.
        denominator: what the sum of the losses is divided by.
        select: marks tokens of the whole batch, ``[N]`` bool, before it is cut into micro-batches; ``loss`` finds them
            in ``LossInputs.selection``. None: it needs none.
        needs_rollout_logprobs: ``loss`` reads the log-probs of the sampler.
        metrics: more statistics of the loss, by ``policy/...`` name.
        takes_shaping_mask: the credit leaves out the tokens that a shaping mask leaves out.
        check: raises if this rank's values cannot be used; it is called where an error reaches all ranks. Its last
            argument is ``[B]`` bool, which responses are correct.
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
