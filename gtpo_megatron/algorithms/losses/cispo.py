"""CISPO: truncated importance weights on the policy gradient itself (MiniMax-M1, arXiv 2506.13585)."""

from torch import Tensor

from gtpo_megatron.algorithms.losses.loss_batch import LossInputs
from gtpo_megatron.config.algorithm import CISPOConfig


def cispo_loss(config: CISPOConfig, inputs: LossInputs) -> Tensor:
    """``-sg(clip(w, 1 - eps_low, 1 + eps_high)) A log pi`` of every token, ``[B, T]`` (arXiv 2506.13585, Eq. 4-5)."""
    weight = inputs.ratio.detach().clamp(1 - config.clip_eps_low, 1 + config.clip_eps_high)
    return -weight * inputs.advantages * inputs.logprobs
