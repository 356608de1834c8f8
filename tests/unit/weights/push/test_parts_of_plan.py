"""What each process plans for itself: together the whole plan, and cheap for a process of a large cluster."""

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtpo_megatron.errors import WeightMappingError
from gtpo_megatron.weights.param_mapping import TensorParallel
from gtpo_megatron.weights.push.layout import PushLayout, SourceRank, TargetWorker, WorkerCoordinates
from gtpo_megatron.weights.push.plan import PushPlan
from gtpo_megatron.weights.push.replicas import assign_slices
from tests.reference.push_plan import least_sent, whole_plan
from tests.strategies import examples
from tests.unit.weights.test_reshard import architecture, places, world

SENDER_POLICIES = ["same_host", "anywhere", "own_rank_first"]
TENSOR = st.sampled_from([1, 2, 4])
BUCKETS = st.sampled_from([128, 320, 1 << 12, 1 << 20])


def layout_between(
    arch,
    shards,
    *,
    engine,
    engines,
    sender_policy,
    bucket_bytes,
    expert_parallel=False,
    hosts=1,
    stages=1,
    in_step=False,
):
    """Ranks with these places, and engines, both spread evenly over hosts; every host has whole replicas."""
    tensor = shards[0].tensor_parallel.size
    return PushLayout(
        sources=tuple(
            SourceRank(rank=rank, coordinates=place, host=f"h{rank * hosts // len(shards)}")
            for rank, place in enumerate(shards)
        ),
        targets=tuple(
            TargetWorker(
                worker=(number * stages + stage) * engine + index,
                coordinates=WorkerCoordinates(TensorParallel(engine, index), expert_parallel, stages, stage),
                host=f"h{number * hosts // engines}",
            )
            for number in range(engines)
            for stage in range(stages)
            for index in range(engine)
        ),
        padded_vocab_size=-(-arch.vocab_size // tensor) * tensor,
        itemsize=2,
        bucket_bytes=bucket_bytes,
        sender_policy=sender_policy,
        in_step=in_step,
    )


def check(arch, layout):
    """Streams are the whole plan's, and ranks' streams are what they have of each rank."""
    expected = whole_plan(arch, layout)
    colocated = layout.sender_policy == "own_rank_first"
    for stream in expected:
        plan = PushPlan(arch, layout)  # of a process of its own
        assert plan.stream(stream.target.worker) == stream
        assert plan.spans(stream.target.worker) == [bucket.spans for bucket in stream.buckets]
        assert plan.num_buckets(stream.target.worker) == len(stream.buckets)
    workers = {stream.target.worker: stream for stream in expected}
    for source in layout.sources:
        parts = {s.worker: s for s in PushPlan(arch, layout).rank_streams(source.rank, passes_on=colocated)}
        for worker, stream in workers.items():
            passes_on = colocated and worker == source.rank
            mine = {
                number: bucket
                for number, bucket in enumerate(stream.buckets)
                if source.rank in bucket.spans or passes_on
            }
            if not mine:
                assert worker not in parts
                continue
            part = parts.pop(worker)
            assert part.num_buckets == len(stream.buckets)
            assert list(part.buckets) == list(mine)
            for number, bucket in mine.items():
                found = part.buckets[number]
                assert found.slices == tuple(one for one in bucket.slices if one.rank == source.rank)
                assert found.spans == (bucket.spans if passes_on else {source.rank: bucket.spans[source.rank]})
                assert found.num_bytes == bucket.num_bytes
        assert not parts
    return expected


@pytest.mark.slow
@examples(20)
@given(
    tensor=TENSOR,
    pipeline=st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (2, 1, 1), (3, 1, 2)]),
    replicas=st.integers(1, 3),
    engine=st.sampled_from([1, 2, 4, 8]),
    engines=st.integers(1, 4),
    tied=st.booleans(),
    family=st.sampled_from(["qwen2", "qwen3", "llama", "glm"]),
    sender_policy=st.sampled_from(SENDER_POLICIES),
    bucket_bytes=BUCKETS,
    vocab=st.sampled_from([5, 64, 70, 150]),
    first_is_stage=st.booleans(),
    stages=st.sampled_from([1, 2, 3, 4]),
    in_step=st.booleans(),
)
def test_dense_models(
    tensor,
    pipeline,
    replicas,
    engine,
    engines,
    tied,
    family,
    sender_policy,
    bucket_bytes,
    vocab,
    first_is_stage,
    stages,
    in_step,
):
    """Also with more workers than key-value heads (4), and with ranks that are numbered unlike Megatron's."""
    arch = architecture(family=family, tied_embeddings=tied, vocab_size=vocab)
    if first_is_stage:
        shards = places(tensor, *pipeline) * replicas
    else:
        shards = world(tensor=tensor, pipeline=pipeline, replicas=replicas)
    fields = {"engine": engine, "engines": engines, "sender_policy": sender_policy, "bucket_bytes": bucket_bytes}
    streams = check(arch, layout_between(arch, shards, stages=stages, in_step=in_step, **fields))
    if in_step:
        assert_in_step(streams)


@pytest.mark.slow
@examples(20)
@given(
    family=st.sampled_from(["qwen3_moe", "glm4_moe", "minimax_m2", "deepseek", "qwen3_next", "qwen3_5"]),
    tensor=TENSOR,
    pipeline=st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (2, 1, 1), (2, 1, 3)]),
    split=st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4), (2, 4)]),
    engine=st.sampled_from([1, 2, 4]),
    engines=st.integers(1, 4),
    expert_parallel=st.booleans(),
    sender_policy=st.sampled_from(SENDER_POLICIES),
    bucket_bytes=BUCKETS,
    stages=st.sampled_from([1, 2, 3]),
    in_step=st.booleans(),
)
def test_mixtures_of_experts(
    family, tensor, pipeline, split, engine, engines, expert_parallel, sender_policy, bucket_bytes, stages, in_step
):
    arch = architecture(family=family, vocab_size=64)
    expert, expert_tensor = split
    shards = world(tensor=tensor, pipeline=pipeline, expert=expert, expert_tensor=expert_tensor, replicas=8 // tensor)
    fields = {"engine": engine, "engines": engines, "sender_policy": sender_policy, "bucket_bytes": bucket_bytes}
    fields |= {"expert_parallel": expert_parallel, "in_step": in_step}
    streams = check(arch, layout_between(arch, shards, stages=stages, **fields))
    if in_step:
        assert_in_step(streams)


def assert_in_step(streams):
    """The workers of an engine that share layers get them in one order, whatever ranks and hosts they are served by.

    A tensor is complete with the bucket of its last slice; the receiver has those of a bucket in the order of the
    model. The experts of a layer are one thing. Of a small vocabulary some workers have nothing.
    """
    orders = {}
    for stream in streams:
        places, last = {name: place for place, name in enumerate(stream.kept)}, {}
        for number, bucket in enumerate(stream.buckets):
            for name in {one.copy.hf_name for one in bucket.slices if ".layers." in one.copy.hf_name}:
                layer = re.sub(r"\.experts\.\d+\..*", ".experts", name)
                last[layer] = max(last.get(layer, (0, 0)), (number, places[name]))
        target = stream.target
        engine = target.worker // (target.coordinates.tensor_parallel.size * target.coordinates.pipeline_size)
        order = sorted(last, key=last.__getitem__)
        assert orders.setdefault((engine, target.coordinates.pipeline_stage), order) == order


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("sender_policy", SENDER_POLICIES)
def test_replicas_send_about_as_little_as_if_they_were_chosen_by_what_they_have_sent(sender_policy, hosts):
    arch = architecture(family="qwen3", vocab_size=64, ffn_size=64)
    for tensor, engine, engines in ((1, 1, 4), (2, 2, 4), (2, 1, 2), (4, 2, 4), (1, 4, 2)):
        shards = places(tensor, 1) * (8 // tensor)
        layout = layout_between(
            arch, shards, engine=engine, engines=engines, sender_policy=sender_policy, bucket_bytes=256, hosts=hosts
        )
        sent = Counter()
        for target in layout.targets:
            for spans in PushPlan(arch, layout).spans(target.worker):
                sent.update({rank: num for rank, (_, num) in spans.items()})
        best = least_sent(arch, layout)
        assert sum(sent.values()) == sum(best.values())
        if sender_policy != "own_rank_first":  # there, what a rank hands to its own worker does not travel
            assert max(sent.values()) <= max(best.values()) + 2 * 256


def test_a_worker_takes_everything_from_its_own_data_parallel_column():
    """TP 2, PP 2, DP 4 and eight engines of 2 on 16 GPUs: each worker has its own rank and one of the other stage."""
    arch = architecture(vocab_size=128)
    shards = world(tensor=2, pipeline=(2, 1), replicas=4)
    layout = layout_between(arch, shards, engine=2, engines=8, sender_policy="own_rank_first", bucket_bytes=512)
    for target in layout.targets:
        ranks = {rank for spans in PushPlan(arch, layout).spans(target.worker) for rank in spans}
        assert ranks == {target.worker % 8, target.worker % 8 + 8}


def test_stages_send_at_the_same_time():
    """Engines that one replica serves begin at different stages."""
    arch = architecture(vocab_size=64)
    shards = world(tensor=2, pipeline=(4, 1), replicas=1)
    layout = layout_between(arch, shards, engine=2, engines=4, sender_policy="anywhere", bucket_bytes=1 << 20)
    firsts = [set(PushPlan(arch, layout).spans(target.worker)[0]) for target in layout.targets]
    assert sorted(rank for ranks in firsts for rank in ranks) == list(range(8))


def test_slices_are_assigned_in_proportion_at_any_time():
    ranks = assign_slices([10] * 12, ((4, 60), (7, 30), (9, 30)))
    for end in range(1, 13):
        for rank, share in ((4, 1 / 2), (7, 1 / 4), (9, 1 / 4)):
            assert abs(ranks[:end].count(rank) - share * end) <= 1
    assert Counter(ranks) == {4: 6, 7: 3, 9: 3}


def test_ranks_of_different_layouts_are_refused():
    arch = architecture()
    layout = layout_between(
        arch, [*places(2, 1), places(1, 1)[0]], engine=1, engines=1, sender_policy="anywhere", bucket_bytes=256
    )
    with pytest.raises(WeightMappingError, match=r"rank 2 is of layout .*tensor=1.* and rank 0 of .*tensor=2"):
        PushPlan(arch, layout)
