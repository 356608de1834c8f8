"""Controls of the study: GTPO with something else in the place of entropy, or with turns that weigh alike."""

from dataclasses import replace
from typing import Literal

import torch
from pydantic import NonNegativeInt
from torch import Tensor

from gtpo_megatron.algorithms import Credit, CreditBatch
from gtpo_megatron.algorithms.credit.gtpo import gtpo_credit
from gtpo_megatron.algorithms.hashing import content_seeds, token_hashes
from gtpo_megatron.algorithms.registry import algorithm_of
from gtpo_megatron.config.algorithm import GTPOConfig
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.errors import ConfigError, ShapeError


@configuration
class ControlConfig(GTPOConfig):
    """GTPO, shaped by something else than entropy, on one side only, or with turns that weigh alike.

    Attributes:
        weight_source: values in the place of entropy: ``uniform`` a constant, ``shuffled`` each response's own
            entropies in random order, ``surprisal`` minus the token's old log-prob.
        weight_seed: seed of ``shuffled``.
        shaped_sides: ``positive`` or ``negative`` shapes correct or wrong responses only; the others weigh uniformly.
        turns_weigh_alike: with ``loss_denominator="response"`` the loss is the mean over responses of the mean over
            their turns of each turn's token mean.
    """

    weight_source: Literal["entropy", "uniform", "shuffled", "surprisal"] = "entropy"
    weight_seed: NonNegativeInt = 0
    shaped_sides: Literal["both", "positive", "negative"] = "both"
    turns_weigh_alike: bool = False

    def __post_init__(self) -> None:
        GTPOConfig.__post_init__(self)
        if self.turns_weigh_alike and self.loss_denominator != "response":
            raise ConfigError(
                f"turns_weigh_alike=true with loss_denominator={self.loss_denominator!r}: expected 'response'"
            )


def control_credit(config: ControlConfig, batch: CreditBatch) -> Credit:
    """GTPO's credit of the batch with the control in the place of its entropies."""
    credit = gtpo_credit(config, with_control(config, batch))
    if not config.turns_weigh_alike:
        return credit
    return replace(credit, advantages=credit.advantages * _turn_weights(batch))


def _turn_weights(batch: CreditBatch) -> Tensor:
    """``|o| / (K |turn|)`` of each token ``[N]``, of a response ``o`` with ``K`` turns.

    The surrogate of a token is its advantage times a number that does not depend on the advantage's size, so weighing
    advantages is weighing tokens.
    """
    number = batch.turns().number
    turn = torch.cumsum(torch.cat([number.new_zeros(1), ((number.diff() != 0) | (batch.row.diff() != 0)).long()]), 0)
    tokens_of = torch.bincount(turn)[turn]
    first = torch.cat([turn.new_ones(1), turn.diff()])
    turns_of = torch.zeros(len(batch.lengths), dtype=torch.int64).index_add_(0, batch.row, first)[batch.row]
    return (batch.lengths[batch.row] / (turns_of * tokens_of)).to(torch.float64)


def check_control(config: ControlConfig, batch: CreditBatch) -> None:
    """The check of GTPO, of what stands in the place of entropy.

    Raises:
        ShapeError: there are no old log-probs to make surprisals of; or as for GTPO.
        DataError: as for GTPO.
    """
    if config.weight_source == "surprisal" and batch.old_logprobs is None:
        raise ShapeError("old_logprobs: got None, needed for weight_source='surprisal'")
    if _GTPO.check is not None:
        _GTPO.check(config, with_control(config, batch))


def with_control(config: ControlConfig, batch: CreditBatch) -> CreditBatch:
    """The batch with the control in the place of its entropies."""
    entropy = batch.entropy
    if config.weight_source == "uniform":
        entropy = torch.ones_like(entropy)
    elif config.weight_source == "surprisal":
        assert batch.old_logprobs is not None
        entropy = -batch.old_logprobs
    elif config.weight_source == "shuffled":
        entropy = _shuffled(batch, config.weight_seed)
    if config.shaped_sides != "both":
        is_shaped = batch.on_tokens(batch.table.is_correct) == (config.shaped_sides == "positive")
        entropy = torch.where(is_shaped, entropy, 1.0)  # weights of equal entropies are exactly 1
    return replace(batch, entropy=entropy)


def _shuffled(batch: CreditBatch, seed: int) -> Tensor:
    """The entropies ``[N]`` of each response in an order that depends on the seed and on the response's content."""
    seeds = content_seeds(batch.entropy.to(torch.float32).view(torch.int32), batch.row, len(batch.lengths), seed)
    keys = token_hashes(seeds.index_select(0, batch.row), batch.place)
    order = torch.argsort(keys, stable=True)
    return batch.entropy[order[torch.argsort(batch.row[order], stable=True)]]


_GTPO = algorithm_of(GTPOConfig())
CONTROL = replace(
    _GTPO,
    config=ControlConfig,
    about="GTPO with a control in the place of entropy",
    credit=control_credit,
    check=check_control,
)
