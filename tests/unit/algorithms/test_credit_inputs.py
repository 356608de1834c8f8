"""What an algorithm weighs tokens by, before any other rank is asked."""

import pytest
import torch
from gtpo_megatron.algorithms.credit_inputs import CreditInputs

from gtpo_megatron.algorithms import assign_credit
from gtpo_megatron.config.algorithm import AlgorithmConfig, GRPOConfig, GRPOSConfig, GTPOConfig
from gtpo_megatron.errors import ConfigError, DataError, ShapeError
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


def test_messages_name_the_tensor_that_was_given() -> None:
    surprisal = {"weight_source": "surprisal", "entropy_floor": 0.0}
    old = torch.tensor([[-2.0, -7.0], [0.0, 0.0], [0.0, 0.0]])
    arguments = {**BATCH.arguments(), "old_logprobs": old}
    with pytest.raises(DataError, match=r"^old_logprobs of response 1 of the batch contains 0\.0 with entropy_floor=0"):
        assign_credit(GTPOConfig(**surprisal), **arguments)
    with pytest.raises(DataError, match=r"^mean old_logprobs of response 1 of the batch contains 0\.0"):
        assign_credit(GRPOSConfig(**surprisal), **arguments)
    with pytest.raises(DataError, match=r"^old_logprobs\[1\] contains 0 and entropy_floor=0"):
        assign_credit(GRPOSConfig(**surprisal, sequence_entropy_mean="geometric"), **arguments)
    with pytest.raises(DataError, match=r"^token_entropy of response 1 of the batch contains 0\.0"):
        assign_credit(GTPOConfig(entropy_floor=0.0), **BATCH.arguments())
    arguments["old_logprobs"] = torch.tensor([[-2.0, 0.5], [0.0, 0.0], [0.0, 0.0]])
    with pytest.raises(DataError, match=r"^old_logprobs\[0, 1\] = 0\.5: expected a finite value <= 0\.0001"):
        assign_credit(GTPOConfig(weight_source="surprisal"), **arguments)


def test_what_is_no_configuration_is_named() -> None:
    with pytest.raises(ConfigError, match=r"config: got str \('gtpo'\), expected one of GTPOConfig, GRPOSConfig, "):
        assign_credit("gtpo", **BATCH.arguments())


@pytest.mark.parametrize("kind", [GTPOConfig, GRPOSConfig])
def test_configured_patterns_are_never_ignored(kind: type) -> None:
    config = kind(unshaped_patterns=("<think>",))
    with pytest.raises(ShapeError, match=r"shaping_mask: got None, needed for unshaped_patterns=\('<think>',\)"):
        assign_credit(config, **BATCH.arguments())
    kept = torch.ones(3, 2, dtype=torch.bool)
    assert assign_credit(config, **BATCH.arguments(), shaping_mask=kept).advantages.any()
