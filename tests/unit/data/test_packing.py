"""Packing loses nothing and adds nothing but the padding it was asked for."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gtpo_megatron.batch import RolloutBatch, mask_of_lengths
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.data.packing import PackLayout, held_positions, micro_batches, pack, plan_micro_batches


def batch_of(lengths, is_own=None):
    """Rows of (prompt, response) lengths whose tokens are all different; ``is_own`` draws who wrote them."""
    prompts, responses = [p for p, _ in lengths], [r for _, r in lengths]
    shape = (len(lengths), max(prompts, default=0)), (len(lengths), max(responses, default=0))
    loss_mask = mask_of_lengths(torch.tensor(responses, dtype=torch.int64), shape[1][1])
    if is_own is not None:
        loss_mask &= is_own[: shape[1][0], : shape[1][1]]
    return RolloutBatch(
        prompt_ids=torch.arange(shape[0][0] * shape[0][1]).reshape(shape[0]) + 1,
        prompt_lengths=torch.tensor(prompts, dtype=torch.int64),
        response_ids=torch.arange(shape[1][0] * shape[1][1]).reshape(shape[1]) + 1000,
        response_lengths=torch.tensor(responses, dtype=torch.int64),
        loss_mask=loss_mask,
        rollout_logprobs=torch.zeros(shape[1]),
        group_ids=torch.zeros(len(lengths), dtype=torch.int64),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
        policy_version=0,
    )


ROWS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=9)


@settings(max_examples=60)
@given(lengths=ROWS, budget=st.integers(1, 40), multiple=st.sampled_from([1, 2, 4]), seed=st.integers(0, 9))
def test_every_token_is_packed_and_those_of_the_policy_are_scored_once(lengths, budget, multiple, seed):
    is_own = torch.rand(9, 12, generator=torch.Generator().manual_seed(seed)) < (1.0, 0.6, 0.1)[seed % 3]
    batch = batch_of(lengths, is_own)
    scored = torch.zeros(batch.response_ids.shape, dtype=torch.int64)
    for micro in micro_batches(batch, range(len(lengths)), budget_tokens=budget, layout=PackLayout(multiple=multiple)):
        assert micro.input_ids.shape == micro.position_ids.shape
        assert len(micro.input_ids) % multiple == 0
        # no padding but what the layout asks for
        assert len(micro.input_ids) - sum(sum(lengths[row]) for row in micro.rows) < multiple
        assert torch.equal(micro.scored, torch.arange(len(micro.token_rows)))
        assert int(micro.cu_seqlens[-1]) == len(micro.input_ids)
        assert int((~micro.is_padding).sum()) == sum(sum(lengths[row]) for row in micro.rows)
        assert micro.input_ids[~micro.is_padding].all()  # the batch's tokens are 1 and more, padding is 0
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
    assert torch.equal(scored, batch.loss_mask.long())


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(1, 30), max_size=20), budget=st.integers(1, 60))
def test_micro_batches_keep_the_budget(lengths, budget):
    bins = plan_micro_batches(lengths, budget)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in rows) <= budget or len(rows) == 1 for rows in bins)


@settings(max_examples=60)
@given(
    lengths=ROWS,
    budget=st.integers(1, 40),
    context=st.sampled_from([2, 3, 4]),
    tensor=st.sampled_from([1, 2, 4]),
)
def test_context_parallel_ranks_share_every_sequence_evenly(lengths, budget, context, tensor):
    config = ParallelConfig(
        num_ranks=context * tensor,
        tensor_parallel_size=tensor,
        context_parallel_size=context,
        sequence_parallel=tensor > 1,
    )
    batch = batch_of(lengths)
    ranks = [
        micro_batches(batch, range(len(lengths)), budget_tokens=budget, layout=PackLayout.of(config, index))
        for index in range(context)
    ]
    for parts in zip(*ranks, strict=True):
        bounds, rows = parts[0].cu_seqlens.tolist(), parts[0].rows
        whole = pack(
            batch,
            rows,
            layout=PackLayout(document_multiple=config.document_multiple, multiple=config.sequence_multiple),
        )
        padded = [sum(lengths[row]) for row in rows]
        assert bounds[-1] - sum(padded) < len(rows) * 2 * context + config.sequence_multiple
        assert sorted(token for part in parts for token in part.scored.tolist()) == list(range(len(whole.token_rows)))
        for index, part in enumerate(parts):
            held = held_positions(bounds, context, index)
            assert len(held) * context == bounds[-1]
            assert len(held) % tensor == 0
            assert (part.rows, part.cu_seqlens.tolist()) == (rows, whole.cu_seqlens.tolist())
            assert torch.equal(part.input_ids, whole.input_ids[held])
            assert torch.equal(part.position_ids, whole.position_ids[held])
            assert torch.equal(part.is_padding, whole.is_padding[held])
            assert torch.equal(held[part.score_positions], whole.score_positions[part.scored])
            assert torch.equal(part.target_ids, whole.target_ids[part.scored])


def sequence_places(micro):
    """Of every sequence of a micro-batch, where its tokens are, those that it shares first."""
    bounds = micro.cu_seqlens.tolist()
    return [
        [place for first, last in stretches for place in range(first, last)] + list(range(start, end))
        for stretches, start, end in zip(micro.prefixes, bounds, bounds[1:], strict=False)
    ]


def batch_of_prompts(groups, *, beginning=0):
    """Groups of a prompt's length and its responses' lengths; prompts have their first ``beginning`` tokens in common.

    Of responses only the first three tokens are alike.
    """
    lengths = [(prompt, response) for prompt, responses in groups for response in responses]
    batch = batch_of(lengths)
    numbers = torch.tensor([i for i, (_, responses) in enumerate(groups) for _ in responses])
    prompts = torch.arange(batch.prompt_ids.shape[1]) + 1
    prompts = torch.where(prompts > beginning, prompts + 100 * numbers[:, None], prompts)
    responses = batch.response_ids.clone()
    responses[:, :3] = 7
    return dataclasses.replace(batch, prompt_ids=prompts, response_ids=responses, group_ids=numbers)


GROUPS = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(0, 12), min_size=1, max_size=4)), min_size=1, max_size=4
)


@settings(max_examples=80)
@given(
    groups=GROUPS,
    budget=st.integers(1, 60),
    multiple=st.sampled_from([1, 4]),
    least=st.integers(1, 6),
    beginning=st.integers(0, 9),
    are_together=st.booleans(),
)
def test_what_sequences_have_in_common_is_packed_once(groups, budget, multiple, least, beginning, are_together):
    batch = batch_of_prompts(groups, beginning=beginning)
    layout = PackLayout(multiple=multiple, min_prefix_tokens=least)
    scored = torch.zeros(batch.response_ids.shape, dtype=torch.int64)
    micros = micro_batches(
        batch, range(batch.num_responses), budget_tokens=budget, layout=layout, are_together=are_together
    )
    for micro in micros:
        tokens, positions = micro.input_ids.tolist(), micro.position_ids.tolist()
        assert len(tokens) % multiple == 0
        assert len(tokens) <= budget + multiple - 1 or len(micro.sequences) == 1
        whole = {}
        for (row, _), places in zip(micro.sequences, sequence_places(micro), strict=True):
            prompt, response = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
            sequence = [*batch.prompt_ids[row, :prompt].tolist(), *batch.response_ids[row, :response].tolist()]
            assert [tokens[place] for place in places[: len(sequence)]] == sequence
            assert [positions[place] for place in places] == list(range(len(places)))
            assert all(micro.is_padding[place] for place in places[len(sequence) :])
            whole[row] = places
        rows = [micro.rows[row] for row in micro.token_rows.tolist()]
        found = zip(rows, micro.token_columns.tolist(), micro.score_positions.tolist(), strict=True)
        assert [whole[row][int(batch.prompt_lengths[row]) + column - 1] for row, column, _ in found] == (
            micro.score_positions.tolist()
        )
        assert torch.equal(batch.response_ids[rows, micro.token_columns], micro.target_ids)
        scored[rows, micro.token_columns] += 1
        # a prompt is there once, if it is long enough to be worth it
        for number, (prompt, _) in enumerate(groups):
            own = [
                places
                for (row, _), places in zip(micro.sequences, sequence_places(micro), strict=True)
                if batch.group_ids[row] == number
            ]
            assert len({tuple(places[:prompt]) for places in own}) <= (1 if prompt >= least else len(own))
    assert torch.equal(scored, batch.loss_mask.long())


def test_responses_to_one_prompt_go_together_as_far_as_the_budget_allows():
    batch = batch_of_prompts([(6, [3, 4, 5]), (8, [2, 2])])
    (micro,) = micro_batches(batch, [3, 0, 1, 4, 2], budget_tokens=30, layout=PackLayout(min_prefix_tokens=4))
    assert micro.rows == (3, 4, 0, 1, 2)
    assert micro.cu_seqlens.tolist() == [0, 10, 12, 21, 25, 30]
    assert micro.prefixes == ((), ((0, 8),), (), ((12, 18),), ((12, 18),))
    assert micro.max_sequence_tokens == 11
    parts = micro_batches(batch, range(5), budget_tokens=14, layout=PackLayout(min_prefix_tokens=4))
    assert [one.rows for one in parts] == [(0, 1), (3, 4), (2,)]
    apart = micro_batches(batch, range(5), budget_tokens=100, layout=PackLayout(min_prefix_tokens=9))
    assert [int(one.cu_seqlens[-1]) for one in apart] == [50]


def test_the_beginning_of_prompts_is_shared_too():
    """As the system prompt that a chat template gives all of them."""
    batch = batch_of_prompts([(9, [2, 2]), (8, [3])], beginning=5)
    (micro,) = micro_batches(batch, range(3), budget_tokens=100, layout=PackLayout(min_prefix_tokens=4))
    assert micro.prefixes == ((), ((0, 9),), ((0, 5),))


def test_a_rank_holds_a_chunk_from_either_end_of_every_sequence():
    assert held_positions([0, 8, 12], 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert held_positions([0, 8, 12], 2, 1).tolist() == [2, 3, 4, 5, 9, 10]


def test_padding_of_sequences_counts_to_the_budget():
    batch = batch_of([(2, 3), (1, 4)])
    assert len(micro_batches(batch, [0, 1], budget_tokens=10, layout=PackLayout())) == 1
    assert len(micro_batches(batch, [0, 1], budget_tokens=10, layout=PackLayout(document_multiple=4, multiple=4))) == 2


def test_no_rows_make_one_micro_batch_that_a_transformer_can_run_on():
    (empty,) = micro_batches(batch_of([(2, 3)]), [], budget_tokens=10, layout=PackLayout(multiple=4))
    assert empty.rows == ()
    assert empty.input_ids.tolist() == [0, 0, 0, 0]
    assert empty.is_padding.tolist() == [True] * 4
    assert empty.cu_seqlens.tolist() == [0, 4]
    assert empty.target_ids.shape == empty.score_positions.shape == (0,)


def test_padding_counts_to_the_last_sequence():
    micro = pack(batch_of([(2, 3), (1, 1)]), [1, 0], layout=PackLayout(multiple=4))
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
