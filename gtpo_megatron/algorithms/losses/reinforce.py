"""REINFORCE (arXiv 2402.14740): the policy gradient itself, unclipped."""

from torch import Tensor

from gtpo_megatron.algorithms.losses.loss_batch import LossInputs
from gtpo_megatron.config.algorithm import AlgorithmConfig


def reinforce_loss(config: AlgorithmConfig, inputs: LossInputs) -> Tensor:  # noqa: ARG001 - it has no constants
    """``-sg(w) A log pi`` of every token, ``[B, T]``.

    ``w`` is 1 in the first update of a rollout batch. In later updates it corrects for the policy's change since.
    """
    return -inputs.ratio.detach() * inputs.advantages * inputs.logprobs
