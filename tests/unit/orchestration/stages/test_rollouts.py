"""Responses in objects of a few groups: who gets which objects, and that nothing is lost or turned round on the way."""

import dataclasses

import pytest
import torch

from gtpo_megatron.batch import RolloutBatch, RolloutShard, mask_of_lengths, take_rows
from gtpo_megatron.errors import RolloutError, ShapeError
from gtpo_megatron.orchestration.stages import rollouts
from gtpo_megatron.orchestration.stages.rollouts import (
    RolloutHandle,
    handles_then_chunks,
    in_chunks,
    joined,
    shards,
    split_by_group,
)

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


@pytest.fixture
def store(monkeypatch):
    """In place of Ray's object store; counts what is read. A group is larger than a chunk, unless a test says more."""

    class Store:
        def __init__(self):
            self.chunks, self.read_rows, self.reads = [], 0, []

        def put(self, chunk):
            self.chunks.append(chunk)
            return len(self.chunks) - 1

        def read(self, references):
            found = [self.chunks[reference] for reference in references]
            self.reads.append(list(references))
            self.read_rows += sum(group.num_responses for chunk in found for group in chunk)
            return found

    found = Store()
    monkeypatch.setattr(rollouts, "_read", found.read)
    monkeypatch.setattr(rollouts, "CHUNK_BYTES", 1)
    return found


def size_of(batch):
    columns = (getattr(batch, field.name) for field in dataclasses.fields(batch))
    return sum(column.nbytes for column in columns if isinstance(column, torch.Tensor))


def split_over_engines(batch, num_engines, store):
    """As the driver sees a batch whose groups were split over engines, unequally."""
    engine_of = [min(row * row % 7, num_engines - 1) for row in range(batch.num_responses)]
    parts = [[row for row, engine in enumerate(engine_of) if engine == index] for index in range(num_engines)]
    order = torch.tensor([row for part in parts for row in part])
    everyone = joined([RolloutHandle.of_groups(batch.select(part), put=store.put) for part in parts if part])
    return everyone.select(order.argsort().tolist())


def test_groups_are_the_batch_cut_between_them():
    batch = make_batch()
    groups = split_by_group(batch)
    assert list(groups) == list(range(NUM_RESPONSES // GROUP_SIZE))
    assert {group.num_responses for group in groups.values()} == {GROUP_SIZE}
    places = [(index, row) for index in groups for row in range(GROUP_SIZE)]
    assert equal(take_rows(list(groups.values()), places), batch)
    assert split_by_group(batch.select([])) == {}


def test_an_engine_answers_with_handles_and_then_with_chunks():
    batch = make_batch(12)
    groups = list(split_by_group(batch).values())
    handles, *objects = handles_then_chunks({"first": tuple(groups[:2]), "second": tuple(groups[2:])})
    assert list(handles) == ["first", "second"]
    assert [handle.objects for handle in handles.values()] == [(), ()]
    found = [dataclasses.replace(one, objects=(chunk,)) for one, chunk in zip(handles.values(), objects, strict=True)]
    assert equal(found[0].fetch(), batch.select(range(8)))
    assert equal(found[1].fetch(), groups[2])
    assert equal(joined(found).fetch(), batch)


def test_neighbouring_groups_share_an_object_and_no_padding(monkeypatch):
    batch = make_batch()
    sizes = [size_of(group) for group in split_by_group(batch).values()]
    monkeypatch.setattr(rollouts, "CHUNK_BYTES", sizes[0] + sizes[1])
    chunks = in_chunks(batch)
    assert [int(group.group_ids[0]) for chunk in chunks for group in chunk] == list(range(len(sizes)))
    assert [int(group.group_ids[0]) for group in chunks[0]] == [0, 1]
    assert len({group.response_ids.shape[1] for group in chunks[0]}) == 2, "each is as wide as its longest response"
    firsts = [int(chunk[0].group_ids[0]) for chunk in chunks]
    for first, end in zip(firsts, [*firsts[1:], len(sizes)], strict=True):
        whole = sum(sizes[first:end])
        assert whole <= rollouts.CHUNK_BYTES or end == first + 1
        assert end == len(sizes) or whole + sizes[end] > rollouts.CHUNK_BYTES
    assert in_chunks(batch.select([])) == []


@pytest.mark.parametrize(("num_engines", "num_alone", "num_together"), [(1, 10, 1), (5, 33, 4)])
def test_chunks_give_the_same_rows_as_groups_of_their_own(store, monkeypatch, num_engines, num_alone, num_together):
    """With many engines each has one response or two of a group, and there were nearly as many objects as responses."""
    batch = make_batch()
    alone = split_over_engines(batch, num_engines, store)
    assert len(store.chunks) == num_alone
    monkeypatch.setattr(rollouts, "CHUNK_BYTES", 1 << 20)
    together = split_over_engines(batch, num_engines, store)
    assert len(store.chunks) - num_alone == num_together
    for rows in (range(NUM_RESPONSES), [39, 3, 17, 18, 4], []):
        assert equal(together.select(rows).fetch(), alone.select(rows).fetch())
    read = [[(list(indices), one) for indices, one in handle.in_turn()] for handle in (alone, together)]
    assert [indices for indices, _ in read[0]] == [indices for indices, _ in read[1]]
    assert all(equal(one, other) for (_, one), (_, other) in zip(*read, strict=True))
    for one, other in zip(shards(alone, 5), shards(together, 5), strict=True):
        assert equal(one().rollouts, other().rollouts)


def test_a_replica_is_not_as_old_as_its_neighbours_in_a_chunk():
    chunk = (make_batch(4, version=1), dataclasses.replace(make_batch(4, version=2), group_ids=torch.full((4,), 9)))
    handle = RolloutHandle.of(*chunk)
    assert handle.policy_version == 1
    assert handle.select(range(4, 8)).fetch().policy_version == 2


@pytest.mark.parametrize("order", [[7, 2, 0, 5, 1, 3, 6, 4], [0, 4, 1, 5], []])
def test_responses_of_groups_in_turn_keep_their_order(order, store):
    batch = make_batch(8).select(order)
    handle = RolloutHandle.of_groups(batch, put=store.put)
    assert equal(handle.fetch(), batch)
    assert torch.equal(handle.group_ids, batch.group_ids)
    assert len(handle.objects) == max(1, len(set(batch.group_ids.tolist())))


@pytest.mark.parametrize("num_engines", [1, 3])
@pytest.mark.parametrize("num_replicas", [1, 2, 5, 64])
def test_every_replica_gets_its_rows_in_order(num_engines, num_replicas, store):
    batch = make_batch()
    handle = split_over_engines(batch, num_engines, store)
    assert torch.equal(handle.response_lengths, batch.response_lengths)
    assert torch.equal(handle.group_ids, batch.group_ids)
    found = [fetch() for fetch in shards(handle, num_replicas)]
    assert [row for shard in found for row in shard.global_rows] == list(range(NUM_RESPONSES))
    for fetched in found:
        expected = RolloutShard.of(batch, fetched.global_rows)
        assert equal(fetched.rollouts, expected.rollouts)
        assert dataclasses.replace(fetched, rollouts=batch) == dataclasses.replace(expected, rollouts=batch)
    if num_replicas == 64:  # more replicas than responses
        assert any(not shard.global_rows for shard in found)


def test_a_replica_reads_only_the_groups_that_have_its_rows(store):
    batch = make_batch()
    handle = split_over_engines(batch, 1, store)
    for fetch in shards(handle, 4):
        store.read_rows = 0
        shard = fetch()
        assert store.read_rows <= len(shard.global_rows) + 2 * (GROUP_SIZE - 1)  # the first and the last may be split
    for fetch in shards(handle, 64):
        store.read_rows = 0
        shard = fetch()
        if not shard.global_rows:
            assert store.read_rows <= GROUP_SIZE  # one object, for the types
            assert shard.rollouts.token_entropy.shape == (0, 0)


def test_a_group_that_several_engines_sampled_comes_together(store):
    batch = make_batch()
    handle = split_over_engines(batch, 3, store)
    rows = [row for row, group in enumerate(batch.group_ids.tolist()) if group == 2]
    assert len(handle.select(rows).objects) > 1
    for order in (rows, list(reversed(rows))):
        assert equal(handle.select(order).fetch(), batch.select(order))


def test_reading_in_turn_gives_every_response_once_and_fetches_a_few_objects_at_a_time(store, monkeypatch):
    monkeypatch.setattr(rollouts, "FETCHED_TOGETHER", 3)
    batch = make_batch(entropy=False)
    found = {}
    handle = split_over_engines(batch, 3, store).select(range(3, 30))
    next(handle.in_turn())
    assert store.reads == [list(handle.objects[:3])]
    store.reads.clear()
    for indices, group in handle.in_turn():
        for index, row in zip(indices, range(group.num_responses), strict=True):
            found[index] = group.response_ids[row, : group.response_lengths[row]].tolist()
    assert [found[i] for i in range(27)] == [
        batch.response_ids[row, : batch.response_lengths[row]].tolist() for row in range(3, 30)
    ]
    assert [one for read in store.reads for one in read] == list(handle.objects)
    assert {len(read) for read in store.reads[:-1]} == {3}


def test_what_dynamic_sampling_dropped_is_left_behind(store):
    first, second = make_batch(), make_batch(12)
    handles = [split_over_engines(batch, 2, store) for batch in (first, second)]
    handle = joined([handles[0].select([]), handles[1].select([1, 0, 7])])
    assert set(handle.objects) < set(handles[1].objects)
    assert equal(handle.fetch(), second.select([1, 0, 7]))
    assert torch.equal(handle.response_lengths, second.response_lengths[[1, 0, 7]])
    assert joined([handle.select([]) for handle in handles]).fetch().num_responses == 0


def test_groups_of_two_policies_mix_only_where_they_may():
    alone = [RolloutHandle.of(make_batch(8, version=1)), RolloutHandle.of(make_batch(8, version=2))]
    with pytest.raises(RolloutError, match=r"policy versions \[1, 2\]: exactly one is needed"):
        joined(alone)
    with pytest.raises(RolloutError, match=r"policy versions \[1, 2\]"):
        joined([alone[0].select([]), alone[1]])
    handle = joined(alone, max_spread=1)
    assert handle.policy_version == 1
    assert handle.fetch().oldest_versions.tolist() == [1] * 8 + [2] * 8
    # a replica with responses of the newer policy alone still knows how old the batch is
    [shard] = [fetch() for fetch in shards(handle.select(range(8, 16)), 1)]
    assert (shard.policy_version, shard.rollouts.policy_version) == (1, 2)
    assert shard.rollouts.oldest_versions.tolist() == [2] * 8


def test_some_with_entropies_and_some_without_do_not_fit():
    with pytest.raises(ShapeError, match="some batches carry the sampler's entropies and some do not"):
        take_rows([make_batch(), make_batch(entropy=False)], [(0, 0), (1, 0)])
    with pytest.raises(ShapeError, match="exactly one is needed"):
        take_rows([], [])
