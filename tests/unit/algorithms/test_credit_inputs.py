"""What an algorithm weighs tokens by, before any other rank is asked."""

import torch

from gtpo_megatron.algorithms.credit_inputs import CreditInputs
from gtpo_megatron.config.algorithm import AlgorithmConfig, GRPOConfig, GRPOSConfig, GTPOConfig
from tests.strategies import Batch

BATCH = Batch([[1.0, 3.0], [-5e-5], []], [1, 0, 0], [4, 4, 5])


def read(config: AlgorithmConfig, **extra: torch.Tensor | None) -> tuple[CreditInputs, tuple]:
    arguments = BATCH.arguments()
    inputs = CreditInputs(
        config,
        arguments["rewards"],
        arguments["token_entropy"],
        arguments["response_mask"],
        arguments["group_ids"],
        extra.get("old_logprobs"),
        extra.get("shaping_mask"),
    )
    return inputs, inputs.read()


def test_entropies_are_used_as_they_are() -> None:
    inputs, (rewards, group_ids, facts, means) = read(GTPOConfig())
    assert inputs.weights is inputs.token_entropy
    assert inputs.has_negatives
    assert not inputs.padding_is_harmless  # where something is below 0, padding may be too: the careful path
    assert rewards.tolist() == [1, 0, 0]
    assert group_ids.tolist() == [4, 4, 5]
    assert facts.highest.tolist() == [3.0, 0.0, 0.0]
    assert means.tolist() == [0.0, 0.0, 0.0]


def test_means_only_where_responses_are_compared() -> None:
    _, (_, _, _, means) = read(GRPOSConfig(entropy_floor=0.5))
    assert means.tolist() == [2.5, 0.5, 0.0]
    kept = torch.tensor([[True, False], [False, False], [True, True]])
    _, (_, _, _, chosen) = read(GRPOSConfig(entropy_floor=0.5), shaping_mask=kept)
    assert chosen.tolist() == [1.5, 0.5, 0.0]  # nothing kept: all tokens
    assert read(GRPOConfig())[1][3].tolist() == [0.0, 0.0, 0.0]


def test_facts_are_those_of_what_takes_entropys_place() -> None:
    inputs, (_, _, facts, _) = read(
        GTPOConfig(weight_source="surprisal"), old_logprobs=torch.tensor([[-2.0, -7.0], [-1.0, 0.0], [0.0, 0.0]])
    )
    assert facts.highest.tolist() == [7.0, 1.0, 0.0]
    assert not inputs.has_negatives
    assert inputs.entropy_total[0] == 4.0  # diagnostics tell of entropy itself
