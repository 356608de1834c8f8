"""The record that describes an algorithm to the trainer, the built-in ones, and their lookup by configuration."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor

from gtpo_megatron.algorithms.credit.distill import check_teacher, distill_credit
from gtpo_megatron.algorithms.credit.eapo import eapo_credit
from gtpo_megatron.algorithms.credit.entropy_advantage import entropy_advantage_credit
from gtpo_megatron.algorithms.credit.entropy_checks import check_entropies
from gtpo_megatron.algorithms.credit.group_relative import group_centred_credit, group_relative_credit
from gtpo_megatron.algorithms.credit.grpo_s import grpo_s_credit
from gtpo_megatron.algorithms.credit.gtpo import gtpo_credit
from gtpo_megatron.algorithms.credit.reinforce_plus_plus import reinforce_plus_plus_credit
from gtpo_megatron.algorithms.credit.rloo import rloo_credit
from gtpo_megatron.algorithms.credit.stare import check_surprisal, stare_credit
from gtpo_megatron.algorithms.losses.cispo import cispo_loss
from gtpo_megatron.algorithms.losses.clipped_surrogate import (
    clip_metrics,
    response_clip_metrics,
    response_surrogate,
    token_surrogate,
)
from gtpo_megatron.algorithms.losses.covariance import clip_cov_loss, kl_cov_loss, select_clip_cov, select_kl_cov
from gtpo_megatron.algorithms.losses.denominators import Denominator
from gtpo_megatron.algorithms.losses.dppo import dppo_loss, dppo_metrics
from gtpo_megatron.algorithms.losses.fipo import fipo_loss, fipo_metrics
from gtpo_megatron.algorithms.losses.loss_batch import LossInputs, SumCount
from gtpo_megatron.algorithms.losses.reinforce import reinforce_loss
from gtpo_megatron.algorithms.losses.top_entropy import select_top_entropy, top_entropy_loss
from gtpo_megatron.algorithms.token_batch import CreditBatch
from gtpo_megatron.batch import Credit
from gtpo_megatron.config.algorithm import (
    AlgorithmConfig,
    CISPOConfig,
    ClipCovConfig,
    DAPOConfig,
    DistillConfig,
    DPPOConfig,
    DrGRPOConfig,
    EAPOConfig,
    EntropyAdvantageConfig,
    FIPOConfig,
    GRPOConfig,
    GRPOSConfig,
    GSPOConfig,
    GTPOConfig,
    KLCovConfig,
    REINFORCEPlusPlusConfig,
    RLOOConfig,
    STAREConfig,
    TopEntropyConfig,
)
from gtpo_megatron.config.algorithm.base import check_sequence_correction
from gtpo_megatron.config.named_function import name_of
from gtpo_megatron.errors import ConfigError

CreditFunction: TypeAlias = Callable[[Any, CreditBatch], Credit]
LossFunction: TypeAlias = Callable[[Any, LossInputs], Tensor]


def _all_tokens(config: AlgorithmConfig) -> Denominator:  # noqa: ARG001 - the signature of ``Algorithm.denominator``
    return Denominator()


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """One algorithm. The first argument of each of its functions is the configuration.

    A built-in algorithm is an entry of ``BUILT_IN``. Anyone else's is a value at the top level of the module
    of its configuration class, under any name; see docs/your_own_algorithm.md.

    Attributes:
        config: its configuration class; the type of a run's configuration selects the algorithm.
        about: one line with the paper.
        credit: computes shaped rewards and advantages. Sums over responses or tokens must use ``exact_sum``, so that
            the result does not depend on the sharding.
        loss: the loss of each token ``[B, T]``, or of each response ``[B]``; values outside the mask are ignored.
        ratio_of: ``response``: ``loss`` returns one value per response.
        denominator: divisor of the sum of the losses.
        select: selects tokens of the whole batch, ``[N]`` bool, by it and its advantages ``[N]``, before it is cut into
            micro-batches; ``loss`` reads them from ``LossInputs.selection``. None: no selection.
        reads_neighbours: the loss of a token depends on other tokens of its response. Then, as for a loss of responses,
            all sequences of a response that branches are in one micro-batch, whatever its budget.
        needs_rollout_logprobs: ``loss`` reads the log-probs of the sampler.
        metrics: further statistics of the loss, by ``policy/...`` name.
        takes_shaped_tokens: the credit can leave out tokens.
        check: raises if this rank's values cannot be used, without collectives; the error is raised on all ranks.
    """

    config: type[AlgorithmConfig]
    about: str
    credit: CreditFunction
    loss: LossFunction
    ratio_of: Literal["token", "response"] = "token"
    denominator: Callable[[Any], Denominator] = _all_tokens
    select: Callable[[Any, CreditBatch, Tensor], Tensor] | None = None
    reads_neighbours: bool = False
    needs_rollout_logprobs: bool = False
    metrics: Callable[[Any, LossInputs], dict[str, SumCount]] = clip_metrics
    takes_shaped_tokens: bool = False
    check: Callable[[Any, CreditBatch], None] | None = None


def _configured(
    config: GTPOConfig | GRPOSConfig | GRPOConfig | DAPOConfig | REINFORCEPlusPlusConfig | EAPOConfig,
) -> Denominator:
    return Denominator(unit=config.loss_denominator)


def _norm_tokens(config: DrGRPOConfig | DPPOConfig) -> Denominator:
    return Denominator(tokens_per_response=config.norm_tokens)


BUILT_IN: tuple[Algorithm, ...] = (
    Algorithm(
        config=GTPOConfig,
        about="rewards shaped by the entropy of each token (2508.04349)",
        credit=gtpo_credit,
        loss=token_surrogate,
        denominator=_configured,
        takes_shaped_tokens=True,
        check=check_entropies,
    ),
    Algorithm(
        config=GRPOSConfig,
        about="rewards shaped by the mean entropy of each response (2508.04349)",
        credit=grpo_s_credit,
        loss=response_surrogate,
        ratio_of="response",
        denominator=_configured,
        metrics=response_clip_metrics,
        takes_shaped_tokens=True,
        check=check_entropies,
    ),
    Algorithm(
        config=GRPOConfig,
        about="rewards standardised over the group (2402.03300)",
        credit=group_relative_credit,
        loss=token_surrogate,
        denominator=_configured,
    ),
    Algorithm(
        config=DAPOConfig,
        about="GRPO with clip-higher, dynamic sampling, token-level loss (2503.14476)",
        credit=group_relative_credit,
        loss=token_surrogate,
        denominator=_configured,
    ),
    Algorithm(
        config=DrGRPOConfig,
        about="GRPO without division by std and length (2503.20783)",
        credit=group_centred_credit,
        loss=token_surrogate,
        denominator=_norm_tokens,
    ),
    Algorithm(
        config=GSPOConfig,
        about="one geometric-mean ratio per response (2507.18071)",
        credit=group_relative_credit,
        loss=response_surrogate,
        ratio_of="response",
        metrics=response_clip_metrics,
    ),
    Algorithm(
        config=CISPOConfig,
        about="truncated, detached ratio times the policy gradient (2506.13585)",
        credit=group_relative_credit,
        loss=cispo_loss,
    ),
    Algorithm(
        config=EntropyAdvantageConfig,
        about="an entropy bonus on the advantage (2506.14758)",
        credit=entropy_advantage_credit,
        loss=token_surrogate,
    ),
    Algorithm(
        config=TopEntropyConfig,
        about="gradient from the tokens of highest entropy only (2506.01939)",
        credit=group_relative_credit,
        loss=top_entropy_loss,
        select=select_top_entropy,
    ),
    Algorithm(
        config=ClipCovConfig,
        about="no gradient from some tokens of high covariance (2505.22617)",
        credit=group_relative_credit,
        loss=clip_cov_loss,
        select=select_clip_cov,
    ),
    Algorithm(
        config=KLCovConfig,
        about="a penalty on the tokens of highest covariance (2505.22617)",
        credit=group_relative_credit,
        loss=kl_cov_loss,
        select=select_kl_cov,
    ),
    Algorithm(
        config=RLOOConfig,
        about="REINFORCE with the mean of the other responses as baseline (2402.14740)",
        credit=rloo_credit,
        loss=reinforce_loss,
        denominator=lambda _: Denominator(tokens_per_response=1),
    ),
    Algorithm(
        config=REINFORCEPlusPlusConfig,
        about="rewards standardised over the batch (2501.03262)",
        credit=reinforce_plus_plus_credit,
        loss=token_surrogate,
        denominator=_configured,
    ),
    Algorithm(
        config=EAPOConfig,
        about="advantages reallocated by entropy within the group (2604.11056v1)",
        credit=eapo_credit,
        loss=token_surrogate,
        denominator=_configured,
    ),
    Algorithm(
        config=STAREConfig,
        about="other weights for surprising tokens while entropy is low (2606.19236)",
        credit=stare_credit,
        loss=token_surrogate,
        check=check_surprisal,
    ),
    Algorithm(
        config=FIPOConfig,
        about="advantages weighed by the ratios of the tokens that follow (2603.19835)",
        credit=group_relative_credit,
        loss=fipo_loss,
        reads_neighbours=True,
        metrics=fipo_metrics,
    ),
    Algorithm(
        config=DPPOConfig,
        about="a trust region of divergence around the sampler's policy (2602.04879)",
        credit=group_centred_credit,
        loss=dppo_loss,
        denominator=_norm_tokens,
        needs_rollout_logprobs=True,
        metrics=dppo_metrics,
    ),
    Algorithm(
        config=DistillConfig,
        about="on-policy distillation: the teacher's log-prob of each token over the student's own",
        credit=distill_credit,
        loss=token_surrogate,
        check=check_teacher,
    ),
)

_BY_CONFIG = {algorithm.config: algorithm for algorithm in BUILT_IN}


def algorithm_of(config: object) -> Algorithm:
    """The algorithm of a configuration: a built-in one, or one defined in the module of the configuration's class.

    Raises:
        ConfigError: ``config`` is not the configuration of an algorithm, or its class has no record or several; or its
            loss has one ratio a response and its off-policy correction one factor a token.
    """
    kind = type(config)
    if kind in _BY_CONFIG:
        return _BY_CONFIG[kind]
    if not isinstance(config, AlgorithmConfig):
        known = ", ".join(algorithm.config.__name__ for algorithm in BUILT_IN)
        raise ConfigError(f"config: got {kind.__name__} ({config!r}), expected one of {known}, or a class of your own")
    found = {id(value): value for value in vars(sys.modules[kind.__module__]).values() if isinstance(value, Algorithm)}
    own = [algorithm for algorithm in found.values() if algorithm.config is kind]
    if len(own) != 1:
        raise ConfigError(
            f"algorithm {name_of(kind)}: {len(own)} records of it in its module, expected one: "
            f"NAME = Algorithm(config={kind.__name__}, ...) at the top level; `gtpo-megatron examples` writes one, and "
            f"docs/your_own_algorithm.md explains it"
        )
    if own[0].ratio_of == "response":
        check_sequence_correction(config.off_policy)
    return own[0]
