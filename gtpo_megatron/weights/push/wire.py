"""Dtypes of elements on the wire."""

import torch

from gtpo_megatron.config.model import ELEMENT_BYTES
from gtpo_megatron.weights.reshard import stays_float32


def wire_dtype(trainer: str, sampler: str) -> str:
    """The narrower of both sides' dtypes: rounding before the way or after it gives the same weights."""
    return min((trainer, sampler), key=ELEMENT_BYTES.__getitem__)


def tensor_dtype(hf_name: str, wire: torch.dtype) -> torch.dtype:
    """Dtype of one tensor on the wire, if ``wire`` is that of the others."""
    return torch.float32 if stays_float32(hf_name) else wire
