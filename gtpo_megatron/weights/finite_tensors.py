"""Checks that weights are finite: one NaN in a model folder would spread to every log-prob."""

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from gtpo_megatron.errors import ConfigError


def is_finite(tensor: Tensor) -> bool:
    """Returns whether no value is NaN or infinite. One pass over the sum, and a second one if the sum overflows."""
    return math.isfinite(tensor.sum(dtype=torch.float32).item()) or bool(torch.isfinite(tensor).all())


def require_finite(pieces: Iterable[Tensor], name: str, *, where: Path) -> None:
    """Raises ConfigError if a piece of the tensor ``name`` holds NaN or infinity."""
    for piece in pieces:
        if not is_finite(piece):
            num = int((~torch.isfinite(piece)).sum())
            raise ConfigError(
                f"{where}: {name} holds NaN or infinity ({num} of {piece.numel()} values looked at); fetch or convert "
                f"the model again"
            )
