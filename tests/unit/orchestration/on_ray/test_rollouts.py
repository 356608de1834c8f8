"""A batch in pieces: who gets which pieces, and that nothing is lost or turned round on the way."""

import dataclasses

import pytest
import torch

from gtpo_megatron.batch import RolloutBatch, RolloutShard, mask_of_lengths, take_rows
from gtpo_megatron.errors import RolloutError, ShapeError
from gtpo_megatron.orchestration.on_ray.rollouts import chosen_rows, in_pieces, joined, shards, summary_and_pieces

NUM_RESPONSES, GROUP_SIZE = 40, 4


def make_batch(num=NUM_RESPONSES, version=3, entropy=True):
    """Responses of very different lengths; their tokens are all different, so that a misplaced one is seen."""
    generator = torch.Generator().manual_seed(num)
    lengths = torch.randint(1, 50, (num,), generator=generator)
    lengths[1::3] = 1
    prompt_lengths = torch.randint(1, 9, (num,), generator=generator)
    width, prompt_width = int(lengths.max()), int(prompt_lengths.max())
    mask, prompt_mask = mask_of_lengths(lengths, width), mask_of_lengths(prompt_lengths, prompt_width)
    tokens = 1 + torch.arange(num * width).reshape(num, width)
    return RolloutBatch(
        prompt_ids=torch.arange(num * prompt_width).reshape(num, prompt_width) * prompt_mask,
        prompt_lengths=prompt_lengths,
        response_ids=tokens * mask,
        response_lengths=lengths,
        loss_mask=mask,
        rollout_logprobs=-tokens.float() * mask,
        group_ids=torch.arange(num) // GROUP_SIZE,
        truncated=torch.arange(num) % 5 == 0,
        policy_version=version,
        token_entropy=0.5 * tokens * mask if entropy else None,
    )


def equal(left, right):
    for field in dataclasses.fields(RolloutBatch):
        a, b = getattr(left, field.name), getattr(right, field.name)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, field.name
    return True


class Store:
    """In place of Ray's object store; counts what is read."""

    def __init__(self):
        self.pieces, self.read_rows = [], 0

    def put(self, batch, piece_bytes=2000):
        """What an engine answers."""
        summary, *_ = summary_and_pieces(batch)
        pieces = list(in_pieces(batch, piece_bytes=piece_bytes))
        self.pieces += pieces
        references = list(range(len(self.pieces) - len(pieces), len(self.pieces)))
        return references, summary | {"piece_sizes": [piece.num_responses for piece in pieces]}

    def read(self, references):
        found = [self.pieces[reference] for reference in references]
        self.read_rows += sum(piece.num_responses for piece in found)
        return found


def split_over_engines(batch, num_engines, store, piece_bytes=2000):
    """As the driver sees a batch whose groups were split over engines, unequally."""
    engine_of = [min(row * row % 7, num_engines - 1) for row in range(batch.num_responses)]
    shares = [[row for row, engine in enumerate(engine_of) if engine == index] for index in range(num_engines)]
    place = {row: (index, there) for index, share in enumerate(shares) for there, row in enumerate(share)}
    answers = [store.put(batch.select(share), piece_bytes) for share in shares]
    return joined(answers, [place[row] for row in range(batch.num_responses)])


def test_routing_counts_in_the_size_of_a_piece():
    batch = make_batch()
    shape = (int(batch.routed_lengths.sum()), 48, 8)  # Qwen3-30B-A3B: 384 bytes per token, 30 times all others
    routed = dataclasses.replace(batch, routed_experts=torch.zeros(shape, dtype=torch.uint8))
    pieces = list(in_pieces(routed, piece_bytes=32 << 10))
    assert len(list(in_pieces(batch, piece_bytes=32 << 10))) == 1
    assert len(pieces) >= routed.routed_experts.nbytes // (32 << 10) > 5
    assert max(piece.routed_experts.nbytes for piece in pieces) < 64 << 10


def test_pieces_are_the_batch_cut_between_rows():
    batch = make_batch()
    pieces = list(in_pieces(batch, piece_bytes=2000))
    assert len(pieces) >= 5
    places = [(index, row) for index, piece in enumerate(pieces) for row in range(piece.num_responses)]
    assert equal(take_rows(pieces, places), batch)
    assert [piece.num_responses for piece in in_pieces(batch)] == [NUM_RESPONSES]  # all of it is small
    assert [piece.num_responses for piece in in_pieces(batch.select([]))] == [0]


@pytest.mark.parametrize("num_engines", [1, 3])
@pytest.mark.parametrize("num_replicas", [1, 2, 5, 64])
def test_every_replica_gets_its_rows_in_order(num_engines, num_replicas):
    batch, store = make_batch(), Store()
    handle = split_over_engines(batch, num_engines, store)
    assert torch.equal(handle.response_lengths, batch.response_lengths)
    assert torch.equal(handle.group_ids, batch.group_ids)
    found = shards(handle, num_replicas)
    assert [row for shard in found for row in shard.rows] == list(range(NUM_RESPONSES))
    for shard in found:
        gathered = shard.gather(store.read)
        expected = RolloutShard.of(batch, shard.rows)
        assert equal(gathered.rollouts, expected.rollouts)
        assert dataclasses.replace(gathered, rollouts=batch) == dataclasses.replace(expected, rollouts=batch)
    if num_replicas == 64:  # more replicas than responses
        assert any(not shard.rows for shard in found)


def test_a_replica_reads_only_the_pieces_that_hold_its_rows():
    batch, store = make_batch(), Store()
    handle = split_over_engines(batch, 1, store)
    for shard in shards(handle, 4):
        store.read_rows = 0
        pieces = {piece for piece, _ in (handle.payload.rows[row] for row in shard.rows)}
        assert set(shard.parts.pieces) == pieces
        shard.gather(store.read)
        assert store.read_rows <= NUM_RESPONSES / 2
    [empty, *_] = [shard for shard in shards(handle, 64) if not shard.rows]
    assert len(empty.parts.pieces) == 1  # for the types
    assert empty.gather(store.read).rollouts.token_entropy.shape == (0, 0)


def test_a_group_that_lies_in_several_pieces_comes_together():
    batch, store = make_batch(), Store()
    handle = split_over_engines(batch, 3, store)
    rows = [row for row, group in enumerate(batch.group_ids.tolist()) if group == 2]
    parts = handle.payload.select(rows)
    assert len(parts.pieces) > 1
    assert equal(parts.gather(store.read), batch.select(rows))
    turned = list(reversed(rows))
    assert equal(handle.payload.select(turned).gather(store.read), batch.select(turned))


def test_one_piece_at_a_time_gives_every_response_once():
    batch, store = make_batch(entropy=False), Store()
    parts = split_over_engines(batch, 3, store).payload.select(range(3, 30))
    found = {}
    for places, piece in parts.one_by_one(store.read):
        for place, row in zip(places, range(piece.num_responses), strict=True):
            found[place] = piece.response_ids[row, : piece.response_lengths[row]].tolist()
    assert [found[i] for i in range(27)] == [
        batch.response_ids[row, : batch.response_lengths[row]].tolist() for row in range(3, 30)
    ]


def test_what_dynamic_sampling_dropped_is_not_held():
    first, second, store = make_batch(), make_batch(12), Store()
    handles = [split_over_engines(batch, 2, store, piece_bytes=300) for batch in (first, second)]
    handle = chosen_rows(handles, [[], [1, 0, 7]])
    assert set(handle.payload.pieces) < set(handles[1].payload.pieces)
    assert equal(handle.payload.gather(store.read), second.select([1, 0, 7]))
    assert torch.equal(handle.response_lengths, second.response_lengths[[1, 0, 7]])
    assert chosen_rows(handles, [[], []]).payload.gather(store.read).num_responses == 0


def test_pieces_of_two_policies_mix_only_where_they_may():
    old, new, store = make_batch(8, version=1), make_batch(12, version=2), Store()
    answers = [store.put(old), store.put(new)]
    rows = [(row % 2, row // 2) for row in range(16)]
    with pytest.raises(RolloutError, match=r"policy versions \[1, 2\]"):
        joined(answers, rows)
    alone = [joined([answer], [(0, row) for row in range(8)]) for answer in answers]
    with pytest.raises(RolloutError, match=r"policy versions \[1, 2\]"):
        chosen_rows(alone, [range(8), range(8)])
    handle = chosen_rows(alone, [range(8), range(8)], max_spread=1)
    assert handle.policy_version == 1
    mixed = handle.payload.gather(store.read)
    assert mixed.oldest_versions.tolist() == [1] * 8 + [2] * 8
    # a replica with responses of the newer policy alone still knows how old the batch is
    only_new = chosen_rows([handle], [range(8, 16)], max_spread=1)
    [shard] = [shard.gather(store.read) for shard in shards(only_new, 1)]
    assert (shard.policy_version, shard.rollouts.policy_version) == (1, 2)
    assert shard.rollouts.oldest_versions.tolist() == [2] * 8


def test_some_with_entropies_and_some_without_do_not_fit():
    with pytest.raises(ShapeError, match="some batches carry the sampler's entropies and some do not"):
        take_rows([make_batch(), make_batch(entropy=False)], [(0, 0), (1, 0)])
    with pytest.raises(ShapeError, match="exactly one is needed"):
        take_rows([], [])
