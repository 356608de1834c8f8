"""Packing loses nothing and adds nothing but the padding it was asked for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gtpo_megatron.batch import RolloutBatch
from gtpo_megatron.data.packing import micro_batches, pack, plan_micro_batches


def batch_of(lengths):
    """Rows of (prompt, response) lengths whose tokens are all different."""
    prompts, responses = [p for p, _ in lengths], [r for _, r in lengths]
    shape = (len(lengths), max(prompts, default=0)), (len(lengths), max(responses, default=0))
    return RolloutBatch(
        prompt_ids=torch.arange(shape[0][0] * shape[0][1]).reshape(shape[0]) + 1,
        prompt_lengths=torch.tensor(prompts, dtype=torch.int64),
        response_ids=torch.arange(shape[1][0] * shape[1][1]).reshape(shape[1]) + 1000,
        response_lengths=torch.tensor(responses, dtype=torch.int64),
        rollout_logprobs=torch.zeros(shape[1]),
        group_ids=torch.zeros(len(lengths), dtype=torch.int64),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
        policy_version=0,
    )


ROWS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=9)


@settings(max_examples=60, deadline=None)
@given(lengths=ROWS, budget=st.integers(1, 40), multiple=st.sampled_from([1, 2, 4]))
def test_every_token_is_packed_and_scored_once(lengths, budget, multiple):
    batch = batch_of(lengths)
    scored = torch.zeros(batch.response_ids.shape, dtype=torch.int64)
    for micro in micro_batches(batch, range(len(lengths)), budget_tokens=budget, multiple=multiple):
        assert micro.input_ids.shape == micro.position_ids.shape
        assert len(micro.input_ids) % multiple == 0
        assert int(micro.cu_seqlens[-1]) == len(micro.input_ids)
        for i, row in enumerate(micro.rows):
            prompt, response = lengths[row]
            start = int(micro.cu_seqlens[i])
            sequence = torch.cat([batch.prompt_ids[row, :prompt], batch.response_ids[row, :response]])
            assert torch.equal(micro.input_ids[start : start + prompt + response], sequence)
            assert torch.equal(micro.position_ids[start : start + prompt + response], torch.arange(prompt + response))
        rows = torch.tensor(micro.rows)[micro.token_rows]
        assert torch.equal(batch.response_ids[rows, micro.token_columns], micro.target_ids)
        # the token before a response token is what predicts it
        assert torch.equal(micro.input_ids[micro.score_positions + 1], micro.target_ids)
        scored[rows, micro.token_columns] += 1
    assert torch.equal(scored, batch.response_mask.long())


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), max_size=20), budget=st.integers(1, 60))
def test_micro_batches_keep_the_budget(lengths, budget):
    bins = plan_micro_batches(lengths, budget)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in rows) <= budget or len(rows) == 1 for rows in bins)


def test_no_rows_make_one_micro_batch_that_a_transformer_can_run_on():
    (empty,) = micro_batches(batch_of([(2, 3)]), [], budget_tokens=10, multiple=4)
    assert empty.rows == ()
    assert empty.input_ids.tolist() == [0, 0, 0, 0]
    assert empty.cu_seqlens.tolist() == [0, 4]
    assert empty.target_ids.shape == empty.score_positions.shape == (0,)


def test_padding_counts_to_the_last_sequence():
    micro = pack(batch_of([(2, 3), (1, 1)]), [1, 0], multiple=4)
    assert micro.cu_seqlens.tolist() == [0, 2, 8]
    assert micro.max_sequence_tokens == 6
    assert micro.rows == (1, 0)
    assert micro.score_positions.tolist() == [0, 3, 4, 5]


@pytest.mark.parametrize("rows", [[0], [2, 1], []])
def test_selected_rows_of_a_batch_trim_their_padding(rows):
    batch = batch_of([(1, 2), (3, 1), (2, 7)])
    part = batch.select(rows)
    assert part.num_responses == len(rows)
    assert part.response_ids.shape[1] == max((int(batch.response_lengths[r]) for r in rows), default=0)
    for i, row in enumerate(rows):
        length = int(batch.response_lengths[row])
        assert torch.equal(part.response_ids[i, :length], batch.response_ids[row, :length])
        assert int(part.response_mask[i].sum()) == length
