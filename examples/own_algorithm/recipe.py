"""Your own algorithm: only the sign of a response's advantage counts, not its size."""

from dataclasses import replace

from torch import Tensor

from gtpo_megatron.algorithms import Algorithm, Credit, CreditBatch, Denominator, LossInputs
from gtpo_megatron.config.algorithm import AlgorithmConfig
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.config.run import RunConfig
from recipes import tiny_cpu


@configuration
class SignConfig(AlgorithmConfig):
    """Every response is pushed up or down equally hard.

    Attributes:
        strength: the advantage of a response that is better than its group.
    """

    strength: float = 1.0


def credit(config: SignConfig, batch: CreditBatch) -> Credit:
    """``A_i = strength * sign(r_i - mean(r))`` within the group."""
    _, mean = batch.group_mean(batch.outcome)
    return batch.of_responses(batch.outcome, config.strength * (batch.outcome - mean).sign())


def loss(config: SignConfig, inputs: LossInputs) -> Tensor:  # noqa: ARG001 - every loss has this signature
    """``-A log pi`` of every token."""
    return -inputs.advantages * inputs.logprobs


SIGN = Algorithm(
    config=SignConfig,
    about="REINFORCE with the sign of the advantage",
    credit=credit,
    loss=loss,
    denominator=lambda config: Denominator(),  # noqa: ARG005 - a mean over all tokens, as in GTPO
)


def recipe() -> RunConfig:
    """The quickstart with this algorithm."""
    return replace(tiny_cpu.gtpo(num_steps=20), name="own_algorithm", algorithm=SignConfig())
