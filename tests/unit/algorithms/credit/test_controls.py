"""Stand-ins for entropy."""

import torch

from gtpo_megatron.algorithms.credit import controls
from gtpo_megatron.algorithms.token_batch import TokenInputs
from gtpo_megatron.config.algorithm import GRPOSConfig, GTPOConfig
from tests.unit.algorithms.parts import column, table_of, tokens_of


def test_what_takes_the_place_of_entropy() -> None:
    inputs = TokenInputs(
        tokens=tokens_of([2, 1, 0]), entropy=column(1.0, 3.0, 0.0), old_logprobs=column(-2.0, -7.0, -1.0)
    )
    assert controls.stand_in(GTPOConfig(), inputs) is inputs.entropy
    assert controls.stand_in(GTPOConfig(weight_source="uniform"), inputs).tolist() == [1.0, 1.0, 1.0]
    assert controls.stand_in(GTPOConfig(weight_source="surprisal"), inputs).tolist() == [2.0, 7.0, 1.0]
    shuffled = controls.stand_in(GTPOConfig(weight_source="shuffled", weight_seed=3), inputs)
    assert torch.equal(shuffled, controls.shuffle_within_responses(inputs.entropy, inputs.tokens, 3))
    # GRPO-S shuffles whole responses
    assert controls.stand_in(GRPOSConfig(weight_source="shuffled"), inputs) is inputs.entropy


def test_shuffling_within_responses_permutes_their_own_tokens() -> None:
    tokens = tokens_of([3, 0, 2])
    values = column(1.0, 2.0, 3.0, 4.0, 5.0)
    seen = set()
    for seed in range(60):
        shuffled = controls.shuffle_within_responses(values, tokens, seed)
        assert shuffled[:3].sort().values.tolist() == [1, 2, 3]
        assert shuffled[3:].sort().values.tolist() == [4, 5]
        seen.add(tuple(shuffled[:3].tolist()))
    assert len(seen) == 6  # every order of three


def test_the_order_belongs_to_the_response() -> None:
    """Neither its place in the batch nor its neighbours change it."""
    alone = controls.shuffle_within_responses(column(1.0, 2.0, 3.0), tokens_of([3]), 5)
    behind = controls.shuffle_within_responses(column(9.0, 8.0, 1.0, 2.0, 3.0), tokens_of([2, 3]), 5)
    assert torch.equal(behind[2:], alone)


def test_shuffling_within_sets_keeps_sides_and_groups() -> None:
    table = table_of([1, 1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1, 0], [1, 2, 3, 1, 2, 1, 0])
    values = column(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)  # of the six with tokens
    seen = set()
    for seed in range(30):
        shuffled = controls.shuffle_within_sets(table, values, seed, spans_batch=False)
        assert shuffled[:3].sort().values.tolist() == [1, 2, 3]
        assert shuffled[3:5].sort().values.tolist() == [4, 5]
        assert float(shuffled[5]) == 6
        seen.add(tuple(shuffled[:3].tolist()))
    assert len(seen) == 6
    batch = controls.shuffle_within_sets(table, values, 1, spans_batch=True)
    assert batch[[0, 1, 2, 5]].sort().values.tolist() == [1, 2, 3, 6]


def test_the_order_of_responses_does_not_matter() -> None:
    rewards, labels, lengths = [1, 1, 1, 0, 0], [0] * 5, [1, 2, 3, 1, 2]
    values = column(1.0, 2.0, 3.0, 4.0, 5.0)
    order = [3, 1, 4, 0, 2]
    moved = table_of(*([part[i] for i in order] for part in (rewards, labels, lengths)))
    for seed in range(5):
        whole = controls.shuffle_within_sets(table_of(rewards, labels, lengths), values, seed, spans_batch=False)
        again = controls.shuffle_within_sets(moved, values[order], seed, spans_batch=False)
        assert torch.equal(again, whole[order])


def test_nothing_to_shuffle() -> None:
    none = torch.zeros(0, dtype=torch.float64)
    assert controls.shuffle_within_responses(none, tokens_of([0, 0]), 0).shape == (0,)
    assert controls.shuffle_within_sets(table_of([1], [0], [0]), none, 0, spans_batch=False).shape == (0,)
