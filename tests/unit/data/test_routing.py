"""Routing goes from rows to ranks and back without a token changing places."""

import pytest
import torch

from gtpo_megatron.batch import RolloutBatch
from gtpo_megatron.data.packing import PackLayout, micro_batches
from gtpo_megatron.data.routing import RoutingLayout, expert_dtype, routing_mismatch, unpack_routing

NUM_EXPERTS, NUM_ROUTERS, PER_TOKEN = 16, 3, 2


def make_layout(**sizes):
    return RoutingLayout(num_routers=NUM_ROUTERS, experts_per_token=PER_TOKEN, num_experts=NUM_EXPERTS, **sizes)


def make_batch(lengths):
    prompts = [1 + i % 4 for i in range(len(lengths))]
    width = max(lengths, default=0)
    return RolloutBatch(
        prompt_ids=torch.ones(len(lengths), max(prompts, default=0), dtype=torch.int64),
        prompt_lengths=torch.tensor(prompts, dtype=torch.int64),
        response_ids=torch.ones(len(lengths), width, dtype=torch.int64),
        response_lengths=torch.tensor(lengths, dtype=torch.int64),
        loss_mask=torch.arange(width) < torch.tensor(lengths, dtype=torch.int64)[:, None],
        rollout_logprobs=torch.zeros(len(lengths), width),
        group_ids=torch.zeros(len(lengths), dtype=torch.int64),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
        policy_version=0,
    )


def experts(num_tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(num_tokens, NUM_ROUTERS, NUM_EXPERTS, generator=generator).topk(PER_TOKEN).indices
    return chosen.to(expert_dtype(NUM_EXPERTS))


@pytest.mark.parametrize("context_size", [1, 2, 4])
@pytest.mark.parametrize("sequence_size", [1, 2])
def test_what_ranks_record_of_one_cut_is_replayed_on_another(context_size, sequence_size):
    """Scoring cuts all rows, an update some of them, into micro-batches of another size."""
    lengths = [9, 1, 14, 6, 3, 20]
    batch = make_batch(lengths)
    totals = (batch.prompt_lengths + batch.response_lengths).tolist()
    truth = {(row, 0): experts(total, row) for row, total in enumerate(totals)}
    sequence_lengths = {row: [total] for row, total in enumerate(totals)}
    layout = make_layout(context_size=context_size, sequence_size=sequence_size)
    pack_layout = PackLayout(
        context_size=context_size,
        document_multiple=1 if context_size == 1 else 2 * context_size,
        multiple=2 * context_size * sequence_size,
    )
    ranks = [(c, s) for c in range(context_size) for s in range(sequence_size)]

    recorded = {}
    for micro in micro_batches(batch, range(len(lengths)), budget_tokens=40, layout=pack_layout):
        whole = torch.full((int(micro.cu_seqlens[-1]), NUM_ROUTERS, PER_TOKEN), 255, dtype=torch.uint8)
        for rank in ranks:
            positions = layout.positions(micro, *rank)
            whole[positions] = layout.pack(truth, micro)[0][positions]
        assert not (whole == 255).any(), "every packed token is on one rank"
        recorded |= unpack_routing(whole, micro, sequence_lengths)
    assert recorded.keys() == truth.keys()
    assert all(torch.equal(recorded[sequence], one) for sequence, one in truth.items())

    chosen = [4, 0, 5]
    for micro in micro_batches(batch, chosen, budget_tokens=25, layout=pack_layout):
        starts = micro.cu_seqlens.tolist()
        for rank in ranks:
            positions = layout.positions(micro, *rank)
            told, is_told = (tensor[positions] for tensor in layout.pack(recorded, micro))
            for position, experts_of_token, has_routing in zip(positions.tolist(), told, is_told, strict=True):
                sequence = max(i for i, start in enumerate(starts[:-1]) if start <= position)
                row = micro.rows[sequence]
                offset = position - starts[sequence]
                assert has_routing == (offset < totals[row])
                assert not has_routing or torch.equal(experts_of_token, truth[row, 0][offset])


def test_a_token_that_the_sampler_has_not_run_has_no_routing():
    batch = make_batch([5])
    (micro,) = micro_batches(batch, [0], budget_tokens=100)
    sampled = experts(int(batch.routed_lengths[0]), 0)
    told, is_told = make_layout().pack({(0, 0): sampled}, micro)
    assert torch.equal(told[:-1], sampled)
    assert is_told.tolist() == [True] * len(sampled) + [False]


def test_an_empty_micro_batch_has_padding_only():
    batch = make_batch([2])
    micro = micro_batches(batch, [], budget_tokens=8, layout=PackLayout(multiple=4))[0]
    told, is_told = make_layout().pack({}, micro)
    assert told.shape == (4, NUM_ROUTERS, PER_TOKEN)
    assert not is_told.any()


def test_sets_are_compared_and_not_their_order():
    ours = torch.tensor([[[1, 2]], [[3, 4]], [[5, 6]]], dtype=torch.uint8)
    theirs = torch.tensor([[[2, 1]], [[3, 5]], [[5, 6]]], dtype=torch.uint8)
    assert routing_mismatch(ours, theirs).tolist() == [[False], [True], [False]]


def test_a_byte_is_enough_for_256_experts():
    assert expert_dtype(256) is torch.uint8
    assert expert_dtype(257) is torch.int16
