"""The relay's connections and its order of sends and receives, under NCCL's rules, at 64 to 1,024 GPUs."""

from collections import Counter

import pytest

from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.weights.experts import Experts
from gtpo_megatron.weights.push.link import SLOTS
from gtpo_megatron.weights.push.plan import PushPlan
from gtpo_megatron.weights.push.transports.process_group import opening_order
from gtpo_megatron.weights.reshard import shard_coordinates
from tests.reference.nccl import Simulation
from tests.unit.weights.push.test_parts_of_plan import layout_between
from tests.unit.weights.test_reshard import architecture

SIZES = {"num_query_groups": 8, "head_size": 128, "vocab_size": 152064, "qkv_bias": True}
MODELS = {
    "32B": SIZES | {"num_layers": 64, "hidden_size": 5120, "ffn_size": 27648, "num_heads": 40},
    "72B": SIZES | {"num_layers": 80, "hidden_size": 8192, "ffn_size": 29568, "num_heads": 64},
    "30B-A3B": SIZES
    | {"family": "qwen3_moe", "num_layers": 48, "hidden_size": 2048, "ffn_size": 6144, "num_heads": 32}
    | {"experts": Experts(num_experts=128, experts_per_token=8, ffn_size=768, layers=(True,) * 48)},
}


def colocated(model, *, engine, **sizes):
    """Engines on all the trainer's GPUs."""
    arch, parallel = architecture(**MODELS[model]), ParallelConfig(**sizes)
    shards = [shard_coordinates(parallel, rank) for rank in range(parallel.num_ranks)]
    fields = {"engine": engine, "engines": parallel.num_ranks // engine, "bucket_bytes": 256 << 20}
    return arch, layout_between(arch, shards, sender_policy="own_rank_first", **fields)


def program(rank, num_ranks, streams, partners):
    """What a rank does in one push, as ``WeightSender`` over ``RelaySender`` does it.

    Args:
        rank: of the program.
        num_ranks: of the group.
        streams: worker -> senders of every bucket, of the workers that the rank has to do with.
        partners: ranks it talks to.
    """
    for partner in opening_order(rank, partners, num_ranks):
        yield "open", partner
    sending, turn, coming = [None] * SLOTS, 0, {}
    events = [(number, worker) for worker, buckets in streams.items() for number in range(len(buckets))]
    for number, worker in sorted(events):
        senders = streams[worker][number]
        if worker == rank:
            for earlier in sorted(one for one in coming if one <= number - SLOTS):
                yield "wait", coming.pop(earlier)  # the worker has read it
            coming[number] = [(sender, rank, number) for sender in senders if sender != rank]
            for transfer in coming[number]:
                yield "start", transfer
        elif rank in senders:
            if sending[turn] is not None:
                yield "wait", [sending[turn]]
            sending[turn] = (rank, worker, number)
            yield "start", sending[turn]
            turn = (turn + 1) % SLOTS
    for number in sorted(coming):
        yield "wait", coming[number]
    yield "wait", [transfer for transfer in sending if transfer is not None]


def simulated(arch, layout, *, one_queue):
    """The push of a whole cluster: the simulation, and the bytes between every two ranks."""
    plan = PushPlan(arch, layout)
    spans = {target.worker: plan.spans(target.worker) for target in layout.targets}
    streams, partners, sent = {rank: {} for rank in spans}, {rank: set() for rank in spans}, Counter()
    for worker, buckets in spans.items():
        senders = {rank for bucket in buckets for rank in bucket}
        for rank in senders | {worker}:
            streams[rank][worker] = [list(bucket) for bucket in buckets]
        for rank in senders - {worker}:
            partners[rank].add(worker)
            partners[worker].add(rank)
        for bucket in buckets:
            sent.update({rank: num for rank, (_, num) in bucket.items() if rank != worker})
    programs = {rank: program(rank, len(spans), streams[rank], partners[rank]) for rank in spans}
    simulation = Simulation(programs, one_queue=one_queue)
    assert simulation.run() == {}, "a deadlock"
    expected = Counter(
        (rank, worker, number)
        for worker, buckets in spans.items()
        for number, bucket in enumerate(buckets)
        for rank in bucket
        if rank != worker
    )
    assert simulation.done == expected
    return simulation, partners, sent


CASES = [  # pairs, most of one rank, rounds in which they open
    pytest.param("32B", {"num_ranks": 64, "tensor_parallel_size": 4, "pipeline_parallel_size": 4}, 4, 96, 3, 5),
    pytest.param("32B", {"num_ranks": 128, "tensor_parallel_size": 4, "pipeline_parallel_size": 4}, 4, 192, 3, 5),
    pytest.param("32B", {"num_ranks": 64, "tensor_parallel_size": 4, "pipeline_parallel_size": 4}, 8, 236, 10, 40),
    pytest.param("72B", {"num_ranks": 512, "tensor_parallel_size": 8, "pipeline_parallel_size": 4}, 8, 768, 3, 5),
    pytest.param("72B", {"num_ranks": 1024, "tensor_parallel_size": 8, "pipeline_parallel_size": 8}, 8, 3584, 7, 15),
    pytest.param(
        "30B-A3B",
        {"num_ranks": 64, "tensor_parallel_size": 4, "sequence_parallel": True, "expert_parallel_size": 8},
        4,
        224,
        7,
        15,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "sizes", "engine", "num_pairs", "most", "rounds"), CASES)
@pytest.mark.parametrize("one_queue", [False, True])
def test_no_rank_waits_for_ever(model, sizes, engine, num_pairs, most, rounds, one_queue):
    """Every bucket arrives once; each rank knows few others; all connections open in a few rounds."""
    arch, layout = colocated(model, engine=engine, **sizes)
    simulation, partners, _ = simulated(arch, layout, one_queue=one_queue)
    assert len(simulation.pairs) == num_pairs
    assert max(map(len, partners.values())) == most
    assert len(simulation.rounds) <= rounds


def test_ranks_of_most_stages_send_at_any_time():
    """In the order of the model it would be one stage of four; the first and the last hold the vocabulary besides."""
    arch, layout = colocated("32B", engine=4, num_ranks=64, tensor_parallel_size=4, pipeline_parallel_size=4)
    plan = PushPlan(arch, layout)
    spans = [plan.spans(target.worker) for target in layout.targets]
    for number in range(min(map(len, spans))):
        senders = {rank for buckets in spans for rank in buckets[number]}
        assert len(senders) >= 48, number


def test_a_deadlock_would_be_found():
    """Two ranks that first send and then receive, over one communicator."""

    def first_send(rank):
        yield "open", 1 - rank
        yield "start", (rank, 1 - rank, "a")
        yield "start", (1 - rank, rank, "a")
        yield "wait", [(rank, 1 - rank, "a")]

    assert Simulation({rank: first_send(rank) for rank in (0, 1)}, one_queue=False).run()
