"""The push plan: every element that a worker keeps is written exactly once, from the right source element."""

from collections import Counter

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from gtpo_megatron.errors import WeightMappingError
from gtpo_megatron.weights.param_mapping import SAMPLER_VOCAB_MULTIPLE, TensorParallel, as_matrix
from gtpo_megatron.weights.push.layout import PushLayout, SourceRank, TargetWorker, WorkerCoordinates
from gtpo_megatron.weights.push.plan import PushPlan, kept_boxes
from gtpo_megatron.weights.reshard import load_plan
from tests.strategies import examples
from tests.unit.weights.test_reshard import EXPERTS, TRAITS, architecture, filled, numbered_tensors, places, world

ITEMSIZE = 4


def push_layout(
    arch,
    *,
    tp=1,
    pp=1,
    virtual=1,
    last=None,
    replicas=1,
    workers=1,
    engines=1,
    bucket_bytes=1 << 12,
    expert_parallel=False,
    **changes,
):
    """Replicas of every shard, and engines of some workers each, all on one host."""
    shards = places(tp, pp, virtual, last)
    fields = {
        "sources": tuple(
            SourceRank(rank=replica * len(shards) + i, coordinates=place)
            for replica in range(replicas)
            for i, place in enumerate(shards)
        ),
        "targets": tuple(
            TargetWorker(
                worker=engine * workers + index,
                coordinates=WorkerCoordinates(TensorParallel(workers, index), expert_parallel),
            )
            for engine in range(engines)
            for index in range(workers)
        ),
        "padded_vocab_size": -(-arch.vocab_size // tp) * tp,
        "itemsize": ITEMSIZE,
        "bucket_bytes": bucket_bytes,
    }
    return PushLayout(**fields | changes)


def worker(size, index, *, expert_parallel=False):
    tensor_parallel = TensorParallel(size, index)
    return TargetWorker(worker=index, coordinates=WorkerCoordinates(tensor_parallel, expert_parallel))


def streams_of(arch, layout):
    """Every worker's stream, as each of them plans it."""
    return [PushPlan(arch, layout).stream(target.worker) for target in layout.targets]


def bytes_sent(streams):
    """What every rank sends."""
    sent = Counter()
    for stream in streams:
        for bucket in stream.buckets:
            sent.update({rank: num for rank, (_, num) in bucket.spans.items()})
    return sent


def item_bytes(layout, name):
    return 4 if name.endswith("e_score_correction_bias") else layout.itemsize


STAGES_THAT_DIFFER = {"family": "qwen3_next", "replicas": 1, "workers": 2, "engines": 1, "tied": False}
STAGES_THAT_DIFFER |= {"bucket_bytes": 1 << 12, "vocab": 64}
"""Of its four layers the third alone has attention."""


def deliver(arch, layout):
    """Plays the push on numbered tensors: what each worker has in the end, and how often each element was written."""
    tensors = numbered_tensors(arch)
    shards = {s.rank: filled(load_plan(arch, s.coordinates, layout.padded_vocab_size), tensors) for s in layout.sources}
    for stream in streams_of(arch, layout):
        got = {name: torch.full_like(as_matrix(tensor), torch.nan) for name, tensor in tensors.items()}
        times = {name: torch.zeros_like(matrix) for name, matrix in got.items()}
        for bucket in stream.buckets:
            assert bucket.num_bytes <= layout.bucket_bytes
            end = 0
            for one in bucket.slices:  # in order, apart, inside their rank's span
                copy = one.copy
                first, num = bucket.spans[one.rank]
                assert end <= one.offset
                end = one.offset + copy.hf_box.num_elements * item_bytes(layout, copy.hf_name)
                assert first <= one.offset
                assert end <= first + num
                got[copy.hf_name][copy.hf_box.slices] = shards[one.rank][copy.megatron_name][copy.megatron_box.slices]
                times[copy.hf_name][copy.hf_box.slices] += 1
        yield stream, tensors, got, times


@pytest.mark.slow
@examples(30)
@given(
    tp=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (2, 1, 1), (3, 1, 2)]),
    replicas=st.integers(1, 3),
    workers=st.sampled_from([1, 2, 4, 8]),
    engines=st.integers(1, 2),
    tied=st.booleans(),
    family=st.sampled_from(sorted(TRAITS)),
    bucket_bytes=st.sampled_from([128, 320, 1 << 12, 1 << 20]),
    vocab=st.integers(5, 150),
)
@example(tp=2, pipeline=(4, 1), **STAGES_THAT_DIFFER)
@example(tp=1, pipeline=(2, 2), **STAGES_THAT_DIFFER)
@example(tp=1, pipeline=(2, 1, 1), **STAGES_THAT_DIFFER)
def test_every_kept_element_is_written_once(
    tp, pipeline, replicas, workers, engines, tied, family, bucket_bytes, vocab
):
    arch = architecture(family=family, tied_embeddings=tied, vocab_size=vocab)
    pp, virtual, *last = pipeline
    layout = push_layout(
        arch,
        tp=tp,
        pp=pp,
        virtual=virtual,
        last=last[0] if last else None,
        replicas=replicas,
        workers=workers,
        engines=engines,
        bucket_bytes=bucket_bytes,
    )
    streams = 0
    for stream, tensors, got, times in deliver(arch, layout):
        streams += 1
        for name, tensor in tensors.items():
            expected = torch.zeros_like(times[name])
            for box in stream.kept.get(name, ()):
                expected[box.slices] = 1
                assert torch.equal(got[name][box.slices], as_matrix(tensor)[box.slices])
            assert torch.equal(times[name], expected)
    assert streams == workers * engines


@pytest.mark.slow
@examples(40)
@given(
    family=st.sampled_from(["qwen3_moe", "glm4_moe", "deepseek", "gpt_oss", "qwen3_next", "qwen3_5"]),
    tp=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([(1, 1), (2, 1), (2, 2), (2, 1, 1), (2, 1, 3)]),
    split=st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4), (2, 4)]),
    workers=st.sampled_from([1, 2, 4]),
    engines=st.integers(1, 2),
    expert_parallel=st.booleans(),
    bucket_bytes=st.sampled_from([128, 320, 1 << 12, 1 << 20]),
)
def test_dense_and_expert_shards_are_two_partitions(
    family, tp, pipeline, split, workers, engines, expert_parallel, bucket_bytes
):
    """Every element that a worker keeps arrives once, and nothing else, whatever the two layouts of the ranks."""
    arch = architecture(family=family, vocab_size=64)
    expert, expert_tensor = split
    shards = world(tensor=tp, pipeline=pipeline, expert=expert, expert_tensor=expert_tensor, replicas=8 // tp)
    layout = push_layout(
        arch,
        tp=tp,
        workers=workers,
        engines=engines,
        expert_parallel=expert_parallel,
        bucket_bytes=bucket_bytes,
        itemsize=2,
        sources=tuple(SourceRank(rank=rank, coordinates=place) for rank, place in enumerate(shards)),
    )
    for stream, tensors, got, times in deliver(arch, layout):
        for name, tensor in tensors.items():
            expected = torch.zeros_like(times[name])
            for box in stream.kept.get(name, ()):
                expected[box.slices] = 1
                assert torch.equal(got[name][box.slices], as_matrix(tensor)[box.slices])
            assert torch.equal(times[name], expected)


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_what_workers_keep_of_experts(expert_parallel):
    """A part of every expert, or some whole experts: either way all of them together, each element once."""
    arch = architecture(family="glm4_moe")
    for size in (1, 2, 4):
        counts = {name: torch.zeros_like(as_matrix(tensor)) for name, tensor in numbered_tensors(arch).items()}
        for index in range(size):
            kept = kept_boxes(arch, worker(size, index, expert_parallel=expert_parallel))
            for name, (box,) in kept.items():
                counts[name][box.slices] += 1
            experts = {int(name.split(".")[5]) for name in kept if ".mlp.experts." in name}
            part = EXPERTS.num_experts // size
            mine = set(range(index * part, (index + 1) * part)) if expert_parallel else set(range(EXPERTS.num_experts))
            assert experts == mine
        for name, count in counts.items():
            if ".experts." in name or "shared_experts" in name:
                assert (count == 1).all()
            elif ".gate." in name:
                assert (count == size).all()


def test_experts_that_do_not_split_over_workers_are_named():
    with pytest.raises(WeightMappingError, match="4 experts do not split over expert_parallel_size=8"):
        kept_boxes(architecture(family="qwen3_moe", num_query_groups=8), worker(8, 0, expert_parallel=True))


def test_expert_replicas_share_the_work():
    """Of 8 ranks with two experts' halves each, the four with equal halves send a quarter each."""
    arch = architecture(family="qwen3_moe", vocab_size=64)
    shards = world(tensor=2, expert=2, replicas=4)
    sources = tuple(SourceRank(rank=rank, coordinates=place) for rank, place in enumerate(shards))
    layout = push_layout(arch, tp=2, engines=4, bucket_bytes=256, sources=sources)
    sent = bytes_sent(streams_of(arch, layout))
    for shard in range(2):  # of experts: ranks 0, 2, 4, 6 and 1, 3, 5, 7
        loads = [sent[rank] for rank in range(shard, 8, 2)]
        assert max(loads) - min(loads) <= 256, sent


def test_workers_together_keep_everything():
    """As vLLM splits: heads, gated rows, input columns, its own vocabulary padding; norms everywhere."""
    arch = architecture(vocab_size=100)
    tensors = numbered_tensors(arch)
    for size in (1, 2, 4, 8):
        counts = {name: torch.zeros_like(as_matrix(tensor)) for name, tensor in tensors.items()}
        for index in range(size):
            for name, (box,) in kept_boxes(arch, worker(size, index)).items():
                counts[name][box.slices] += 1
        for name, count in counts.items():
            if "norm" in name:
                assert (count == size).all()
            elif "k_proj" in name or "v_proj" in name:
                assert (count == max(1, size // arch.num_query_groups)).all()
            else:
                assert (count == 1).all()


@pytest.mark.parametrize(("tied", "layers", "expected"), [(False, 4, [2, 2]), (True, 7, [2, 2, 2, 1])])
def test_stages_of_an_engine_keep_their_layers_and_ends(tied, layers, expected):
    """Embedding first; last norm and output layer last, which tied is the embedding again. Together it is the model."""
    arch = architecture(tied_embeddings=tied, num_layers=layers)
    kept = [
        kept_boxes(
            arch,
            TargetWorker(worker=0, coordinates=WorkerCoordinates(TensorParallel(1, 0), False, len(expected), stage)),
        )
        for stage in range(len(expected))
    ]
    assert [len({name.split(".")[2] for name in names if ".layers." in name}) for names in kept] == expected
    ends = [[name for name in names if ".layers." not in name] for names in kept]
    last = ["model.norm.weight"] if tied else ["model.norm.weight", "lm_head.weight"]
    embedding = ["model.embed_tokens.weight"]
    assert ends == [embedding, *([[]] * (len(expected) - 2)), [*(embedding if tied else []), *last]]
    assert set().union(*kept) == set(numbered_tensors(arch))


def test_vllm_gives_the_stages_these_layers():
    indices = pytest.importorskip("vllm.distributed.utils").get_pp_indices
    for layers in range(1, 70):
        for size in range(1, min(layers, 9) + 1):
            for stage in range(size):
                found = WorkerCoordinates(TensorParallel(1, 0), False, size, stage).layers(layers)
                assert (found.start, found.stop) == tuple(indices(layers, stage, size)), (layers, size, stage)


def test_vocabulary_splits_as_vllm_pads_it():
    arch = architecture(vocab_size=SAMPLER_VOCAB_MULTIPLE + 10)
    kept = [kept_boxes(arch, worker(4, index)) for index in range(4)]
    rows = [boxes["model.embed_tokens.weight"][0].num_rows for boxes in kept if "model.embed_tokens.weight" in boxes]
    assert rows == [32, 32, 10]  # 74 rows, padded to 128; the last worker has padding only


@pytest.mark.parametrize(("tp", "workers"), [(2, 1), (2, 2), (4, 2), (1, 4)])
def test_replicas_share_the_work(tp, workers):
    arch = architecture(vocab_size=64, ffn_size=64)
    layout = push_layout(arch, tp=tp, replicas=3, workers=workers, engines=2, bucket_bytes=256)
    sent = bytes_sent(streams_of(arch, layout))
    for shard in range(tp):
        loads = [sent[replica * tp + shard] for replica in range(3)]
        assert all(abs(load - sum(loads) / 3) <= 256 for load in loads), sent  # a slice


def test_a_worker_far_away_needs_a_whole_replica_beside_it():
    arch = architecture()
    near, far = (
        SourceRank(rank=rank, coordinates=place, host=host)
        for rank, place, host in ((0, places(1, 1)[0], "a"), (1, places(1, 1)[0], "b"))
    )
    worker = TargetWorker(worker=0, coordinates=WorkerCoordinates(TensorParallel(1, 0)), host="b")
    layout = push_layout(arch, sources=(near, far), targets=(worker,))
    assert {one.rank for s in streams_of(arch, layout) for bucket in s.buckets for one in bucket.slices} == {1}
    with pytest.raises(WeightMappingError, match=r"host 'b'.*rank 0 \('a'\).*process_group"):
        streams_of(arch, push_layout(arch, sources=(near,), targets=(worker,)))
    streams_of(arch, push_layout(arch, sources=(near,), targets=(worker,), sender_policy="anywhere"))


def test_a_worker_takes_from_its_own_rank_what_that_holds():
    """Same layout on both sides: nothing but norms leaves a GPU, which rank 0 of a tensor-parallel group sends."""
    arch = architecture(vocab_size=2 * SAMPLER_VOCAB_MULTIPLE)
    layout = push_layout(arch, tp=2, replicas=2, workers=2, engines=2, sender_policy="own_rank_first")
    for stream in streams_of(arch, layout):
        slices = [one for bucket in stream.buckets for one in bucket.slices]
        assert {p.rank for p in slices if "norm" not in p.copy.hf_name} == {stream.target.worker}
    layout = push_layout(arch, tp=1, pp=2, workers=1, engines=2, sender_policy="own_rank_first")
    for stream in streams_of(arch, layout):
        own = [p.rank == stream.target.worker for bucket in stream.buckets for p in bucket.slices]
        assert any(own)
        assert not all(own)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": push_layout(architecture(), pp=2).sources[:1]}, "hold 0 of the 12 elements"),
        ({"sources": push_layout(architecture(), tp=2).sources[:1], "padded_vocab_size": 14}, "do the sources cover"),
        ({"bucket_bytes": 32}, r"a row of 48 bytes exceeds.*weight_sync.bucket_mib"),
        ({"workers": 3}, "does not split over tensor_parallel_size=3"),
    ],
)
def test_layouts_that_cannot_be_mapped(changes, message):
    with pytest.raises(WeightMappingError, match=message):
        streams_of(architecture(), push_layout(architecture(), **changes))


def test_bytes_of_a_32b_model_are_the_least_possible():
    """Qwen2.5-32B, TP 8 x PP 4 into TP 4: no more than each worker's own slices travel."""
    arch = architecture(
        num_layers=64,
        hidden_size=5120,
        ffn_size=27648,
        num_heads=40,
        num_query_groups=8,
        head_size=128,
        vocab_size=152064,
        qkv_bias=True,
    )
    layout = push_layout(arch, tp=8, pp=4, replicas=2, workers=4, bucket_bytes=256 << 20, itemsize=2)
    streams = streams_of(arch, layout)
    travelling = sum(bucket.num_bytes for stream in streams for bucket in stream.buckets)
    needed = sum(box.num_elements * 2 for stream in streams for (box,) in stream.kept.values())
    assert 65e9 < needed < 66e9  # 32.8 billion parameters in bfloat16, norms four times
    assert travelling <= 1.001 * needed
