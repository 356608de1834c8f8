"""Checks of what shapes rewards."""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.checks import first_place
from gtpo_megatron.algorithms.credit.shaping import LEAST_ENTROPY, SINGLE_POOL
from gtpo_megatron.algorithms.credit.turn_rewards import check_turn_rewards
from gtpo_megatron.algorithms.token_batch import CreditBatch
from gtpo_megatron.config.algorithm import EntropyCreditSettings, GRPOSConfig, GTPOConfig
from gtpo_megatron.errors import DataError, ShapeError


def takes_inverses(config: EntropyCreditSettings) -> bool:
    """Whether ``y``, which takes ``1/H`` of incorrect responses, shapes a reward."""
    return config.formulation not in SINGLE_POOL


def check_entropies(config: EntropyCreditSettings, batch: CreditBatch) -> None:
    """Checks that the inverses and logarithms that the configuration needs exist, and the rewards of turns.

    Args:
        config: configuration of GTPO or GRPO-S.
        batch: this rank's tokens.

    Raises:
        ShapeError: a tensor that the configuration needs was not given.
        DataError: an entropy is 0 with ``entropy_floor=0``, or it is too large; or a turn has no reward.
    """
    if isinstance(config, GTPOConfig) and config.turn_reward_coef:
        check_turn_rewards(batch, coef=config.turn_reward_coef)
    if config.unshaped_patterns and batch.shaped_tokens is None:
        raise ShapeError(
            f"shaped_tokens: got None, needed for unshaped_patterns={config.unshaped_patterns!r}; "
            "data.shaped_tokens makes it from the sampled tokens"
        )
    entropies = batch.entropy
    if not len(entropies):
        return
    low, high = config.entropy_clip or (0.0, torch.finfo(torch.float64).max)
    smallest, largest = (end.clamp(low, high) + config.entropy_floor for end in torch.aminmax(entropies))
    if smallest < LEAST_ENTROPY:
        takes_logs, inverts = config.entropy_mean == "geometric", takes_inverses(config)
        if isinstance(config, GRPOSConfig):
            takes_logs |= config.sequence_entropy_mean == "geometric"
            inverts = False  # GRPO-S inverts means; ``_check_invertible`` checks them
        is_correct = batch.table.is_correct
        needed = ~is_correct if inverts else torch.zeros_like(is_correct)
        needed |= takes_logs
        bad = entropies.clamp(low, high) + config.entropy_floor < LEAST_ENTROPY
        _refuse(config, batch, bad & batch.on_tokens(needed), "is 0")
    if largest > 1 / LEAST_ENTROPY:
        _refuse(config, batch, entropies > 1 / LEAST_ENTROPY, f"is above {1 / LEAST_ENTROPY}")


def _refuse(config: EntropyCreditSettings, batch: CreditBatch, bad: Tensor, words: str) -> None:
    if bool(bad.any()):
        row, column = first_place(batch.response_mask, bad)
        raise DataError(
            f"token_entropy[{row}, {column}] {words} with entropy_floor={config.entropy_floor}: its inverse or "
            "logarithm does not exist; set entropy_floor above 0, or entropy_clip"
        )
