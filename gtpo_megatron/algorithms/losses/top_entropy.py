"""Gradient only from the tokens of highest entropy (arXiv 2506.01939)."""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.losses.clipped_surrogate import token_surrogate
from gtpo_megatron.algorithms.losses.loss_batch import LossInputs
from gtpo_megatron.algorithms.losses.selection import largest, num_selected, ordered_integers
from gtpo_megatron.algorithms.token_batch import CreditBatch
from gtpo_megatron.config.algorithm import TopEntropyConfig


def select_top_entropy(config: TopEntropyConfig, batch: CreditBatch, advantages: Tensor) -> Tensor:  # noqa: ARG001
    """The ``top_fraction`` of the batch's tokens with the highest entropy, ``[N]`` bool."""
    keys = ordered_integers(batch.entropy)
    return largest(
        keys, torch.ones_like(keys, dtype=torch.bool), num_selected(batch, config.top_fraction), batch.reduction
    )


def top_entropy_loss(config: TopEntropyConfig, inputs: LossInputs) -> Tensor:
    """The clipped surrogate of the selected tokens; the denominator counts all tokens (arXiv 2506.01939, Eq. 5)."""
    assert inputs.selection is not None
    return torch.where(inputs.selection, token_surrogate(config, inputs), 0.0)
