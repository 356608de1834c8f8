"""Dense float64 scores, as the formulas say them; the vocabulary is whole and every column is there."""

from typing import NamedTuple

import torch
from torch import Tensor


class DenseScores(NamedTuple):
    """``[P]`` float64 each."""

    logprobs: Tensor
    entropy: Tensor


def dense_scores(
    logits: Tensor, target_ids: Tensor, temperature: float | Tensor = 1.0, vocab_size: int | None = None
) -> DenseScores:
    """``log p_y`` and ``H = -sum p log p`` by log_softmax in float64, differentiable by autograd."""
    scaled = logits.double()[:, :vocab_size]
    scaled = scaled / (temperature.double()[:, None] if isinstance(temperature, Tensor) else temperature)
    log_p = torch.log_softmax(scaled, dim=1)
    p = log_p.exp()
    # A column that cannot occur adds nothing: 0 log 0 = 0.
    entropy = -torch.where(p > 0, p * log_p, 0.0).sum(1)
    return DenseScores(log_p.gather(1, target_ids[:, None]).squeeze(1), entropy)
