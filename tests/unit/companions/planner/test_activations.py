"""What layers keep for the backward pass, against what autograd is seen to keep of a real model on the CPU."""

import itertools
from dataclasses import replace

import pytest

from gtpo_megatron.companions.planner.activations import (
    CHUNK_TOKENS,
    FLOAT32_BYTES,
    in_flight,
    layer_bytes_per_token,
    saved_by_final_norm,
    saved_by_layer,
)
from gtpo_megatron.companions.planner.known_models import KNOWN_MODELS
from gtpo_megatron.companions.planner.layout import Layout, layers_of_chunk
from gtpo_megatron.weights.experts import Experts
from gtpo_megatron.weights.model_shape import DeltaNet, LatentAttention, LayerKind, ModelShape
from tests.dist_utils import run_processes
from tests.unit.companions.planner import balanced_experts, real_megatron

TOKENS = 256
DENSE_LAYER, SPARSE_LAYER = LayerKind(), LayerKind(has_experts=True)
QWEN2 = ModelShape(
    num_layers=3,
    hidden_size=128,
    ffn_size=448,
    num_heads=8,
    num_query_groups=2,
    head_size=32,
    vocab_size=503,
    max_positions=1024,
    qkv_bias=True,
)
QWEN3 = ModelShape(
    num_layers=3,
    hidden_size=192,
    ffn_size=320,
    num_heads=4,
    num_query_groups=2,
    head_size=64,
    vocab_size=503,
    max_positions=1024,
    qk_norm=True,
)


def case(tensor, sequence_parallel, recompute):
    return Layout(num_ranks=tensor, tensor=tensor, sequence_parallel=sequence_parallel, recompute=recompute)


SPARSE = replace(
    QWEN2,
    num_layers=2,
    experts=Experts(num_experts=8, experts_per_token=2, ffn_size=96, layers=(True, True)),
)
MIXED = replace(
    QWEN2,
    experts=Experts(
        num_experts=16,
        experts_per_token=4,
        ffn_size=64,
        layers=(False, True, True),
        shared_ffn_size=96,
        score="sigmoid",
        scaling=2.5,
        has_bias=True,
    ),
)
LATENT = replace(
    MIXED,
    num_query_groups=8,
    head_size=48,
    qkv_bias=False,
    latents=LatentAttention(query_rank=80, key_value_rank=112, rotated_size=16, value_size=40),
)
LATENT_LITE = replace(LATENT, latents=replace(LATENT.latents, query_rank=None))
DELTA = replace(
    QWEN3,
    num_layers=4,
    has_output_gate=True,
    delta=DeltaNet(
        num_key_heads=2,
        num_value_heads=6,
        key_size=24,
        value_size=40,
        conv_size=4,
        layers=(True, True, True, False),
    ),
)
SPARSE_DELTA = replace(
    DELTA, experts=replace(SPARSE.experts, layers=(True,) * 4, shared_ffn_size=72, has_shared_gate=True)
)
EXPERT_LAYOUTS = [
    Layout(num_ranks=1),
    Layout(num_ranks=8, expert=8),
    Layout(num_ranks=4, tensor=2, sequence_parallel=True, expert=4),
    Layout(num_ranks=4, tensor=2, sequence_parallel=True, expert=2, expert_tensor=2),
]

CASES = [
    (shape, case(tensor, sequence_parallel, recompute), weight_bytes)
    for shape in (QWEN2, QWEN3)
    for weight_bytes in (2, 4)
    for recompute in ("none", "selective", "full")
    for tensor, sequence_parallel in ((1, False), (2, False), (2, True))
] + [
    (shape, replace(layout, recompute=recompute), weight_bytes)
    for shape in (SPARSE, MIXED)
    for layout in EXPERT_LAYOUTS
    for weight_bytes, recompute in ((2, "none"), (4, "none"), (2, "selective"), (2, "experts"), (2, "full"))
]
CASES += [
    (shape, replace(layout, recompute=recompute), weight_bytes)
    for shape, layout in ((LATENT, EXPERT_LAYOUTS[0]), (LATENT, EXPERT_LAYOUTS[2]), (LATENT_LITE, EXPERT_LAYOUTS[2]))
    for weight_bytes, recompute in ((2, "none"), (4, "none"), (2, "selective"))
]


CASES += [
    (DELTA, case(tensor, tensor > 1, recompute), weight_bytes)
    for tensor in (1, 2)
    for weight_bytes, recompute in ((2, "none"), (4, "none"), (2, "selective"), (2, "full"))
]
CASES += [
    (SPARSE_DELTA, replace(layout, recompute=recompute), 2)
    for layout in EXPERT_LAYOUTS[:2]
    for recompute in ("none", "selective", "experts")
]
OLMO2 = replace(QWEN3, norm_placement="post", qk_norm_spans_heads=True)
GLM4 = replace(QWEN2, norm_placement="sandwich")
CASES += [
    (shape, case(tensor, tensor > 1, "none"), weight_bytes)
    for shape in (OLMO2, GLM4)
    for tensor in (1, 2)
    for weight_bytes in (2, 4)
]


ONE_OF_EACH_KIND = [
    (QWEN2, case(2, True, "none")),
    (QWEN3, case(2, True, "none")),
    (MIXED, EXPERT_LAYOUTS[3]),
    (LATENT, EXPERT_LAYOUTS[2]),
    (DELTA, case(2, True, "none")),
]
"""In float32 in the gate, where in bfloat16 all are."""
IN_GATE = [case for case in CASES if case[2] == 2 or case[:2] in ONE_OF_EACH_KIND]
IN_FLOAT32 = [case for case in CASES if case not in IN_GATE]


def measure(rank, world_size, init_method, cases):
    balanced_experts.install()
    return [
        real_megatron.saved_bytes(shape, layout, weight_bytes=weight_bytes, tokens=TOKENS)
        for shape, layout, weight_bytes in cases
    ]


@pytest.fixture(scope="module")
def measured():
    return run_processes(measure, 1, IN_GATE, timeout_s=400.0)[0]


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.timeout(420)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(len(IN_GATE)))
def test_saved_bytes_are_those_of_a_real_model(measured, number):
    assert_planned(IN_GATE[number], measured[number])


@pytest.mark.nightly
@pytest.mark.megatron
@pytest.mark.timeout(420)
@pytest.mark.filterwarnings("ignore")
def test_saved_bytes_are_those_of_a_real_model_in_float32():
    found = run_processes(measure, 1, IN_FLOAT32, timeout_s=400.0)[0]
    for case_of_model, num_bytes in zip(IN_FLOAT32, found, strict=True):
        assert_planned(case_of_model, num_bytes)


def assert_planned(case_of_model, num_bytes):
    shape, layout, weight_bytes = case_of_model
    planned = layer_bytes_per_token(layout, saved_by_final_norm(shape, weight_bytes))
    for kind, count in shape.layers_between(0, shape.num_layers):
        saved = saved_by_layer(shape, "torch", weight_bytes, layout.recompute, kind, layout.tensor)
        planned += count * layer_bytes_per_token(layout, saved)
    if layout.recompute == "full":  # angles of the packed tokens, one tensor for all layers: a real model's is 0.1%
        planned += FLOAT32_BYTES * (shape.head_size if shape.latents is None else shape.latents.rotated_size)
    tolerance = 0.05 if layout.recompute == "full" else 0.01
    if shape.delta is not None and layout.recompute != "full":
        tolerance = 0.035  # a sequence's first chunk of 64 tokens has no state to read, and so keeps less
    assert planned * TOKENS == pytest.approx(num_bytes, rel=tolerance), layout


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.filterwarnings("ignore")
def test_chunks_of_a_delta_net_are_as_long_as_the_trainer_s():
    from gtpo_megatron.actor.model import delta_net

    assert delta_net.CHUNK == CHUNK_TOKENS


def test_transformer_engine_keeps_what_its_layers_save():
    """By hand, for Qwen2.5-32B in bfloat16, a token on one GPU without parallelism."""
    shape = KNOWN_MODELS["Qwen/Qwen2.5-32B"]
    hidden, query, keys, mlp = 5120, 5120, 1024, 27648
    elements = 2 * hidden + query + 2 * keys + query + 2 * hidden + 3 * mlp
    rows = 4 * (1 + 1 + 40)  # float32: a factor for each norm, a log-sum-exp for each head
    saved = saved_by_layer(shape, "te", 2, "none", DENSE_LAYER)
    assert layer_bytes_per_token(Layout(num_ranks=1), saved) == 2 * elements + rows


def test_sequence_parallelism_splits_what_tensor_parallelism_leaves_whole():
    shape = KNOWN_MODELS["Qwen/Qwen2.5-32B"]
    saved = saved_by_layer(shape, "te", 2, "none", DENSE_LAYER)
    whole, tensor, sequence = (
        layer_bytes_per_token(layout, saved)
        for layout in (
            Layout(num_ranks=8),
            Layout(num_ranks=8, tensor=8),
            Layout(num_ranks=8, tensor=8, sequence_parallel=True),
        )
    )
    assert sequence == pytest.approx(whole / 8)
    assert tensor > 2 * sequence


def test_less_is_kept_with_more_recomputation():
    for name, shape in KNOWN_MODELS.items():
        kinds = [kind for kind, _ in shape.layers_between(0, shape.num_layers)]
        for kernels, kind in itertools.product(("te", "torch"), kinds):
            kept = [
                layer_bytes_per_token(Layout(num_ranks=1), saved_by_layer(shape, kernels, 2, recompute, kind))
                for recompute in ("none", "selective", "full")
            ]
            assert kept[0] > kept[1] > kept[2] == 2 * shape.hidden_size, name


def test_transformer_engine_keeps_what_its_experts_save():
    """By hand, for GLM-4.5-Air in bfloat16, a token on one GPU: 8 copies of 4,096, of experts 1,408 wide."""
    shape = KNOWN_MODELS["zai-org/GLM-4.5-Air"]
    layer, dense = (saved_by_layer(shape, "te", 2, "none", kind) for kind in (SPARSE_LAYER, DENSE_LAYER))
    attention = 2 * (2 * 4096 + 12288 + 2 * 1024 + 12288) + 4 * (1 + 96)
    norm = 2 * 2 * 4096 + 4
    router = 8 * 8 + 4 * (128 + 8 + 1) + 4 * 257
    experts = 8 * (2 * 4096 + 4 + 4 + 2 * 3 * 1408)
    shared = 2 * 3 * 1408
    assert layer_bytes_per_token(Layout(num_ranks=1), layer) == attention + norm + router + experts + shared
    assert layer_bytes_per_token(Layout(num_ranks=1), dense) == attention + norm + 2 * 3 * 10944


def test_the_busiest_rank_keeps_more_of_what_was_dispatched():
    shape = KNOWN_MODELS["Qwen/Qwen3-30B-A3B"]
    saved = saved_by_layer(shape, "te", 2, "none", SPARSE_LAYER)
    layout = Layout(num_ranks=64, tensor=2, sequence_parallel=True, expert=8)
    even, busy = (layer_bytes_per_token(layout, saved, imbalance) for imbalance in (1.0, 1.5))
    assert busy - even == 0.5 * 8 * (2 * 2048 + 4 + 4 + 2 * 3 * 768) / 2
    alone = replace(layout, expert=1)
    assert layer_bytes_per_token(alone, saved, 1.5) == layer_bytes_per_token(alone, saved, 1.0) == even
    # gathered by twice as many ranks, each with half of the columns
    gathered = layer_bytes_per_token(replace(layout, expert_tensor=2), saved, 1.0)
    assert gathered - even == 8 * (2 * 2048 + 4 + 4) / 2


def simulated_peak(pipeline, virtual, stage, micro_batches):
    """Megatron's schedule by its own numbers: forwards first, then one backward after every forward."""
    total = micro_batches * virtual
    warm_up = pipeline - stage - 1 if virtual == 1 else 2 * (pipeline - stage - 1) + (virtual - 1) * pipeline
    held = peak = min(warm_up, total)
    for _ in range(total - min(warm_up, total)):
        held += 1
        peak = max(peak, held)
        held -= 1
    return peak


@pytest.mark.parametrize(("pipeline", "virtual"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (2, 4), (4, 4)])
@pytest.mark.parametrize("micro_batches", [1, 4, 32])
def test_chunks_in_flight(pipeline, virtual, micro_batches):
    layout = Layout(num_ranks=pipeline, pipeline=pipeline, virtual=virtual)
    for stage in range(pipeline):
        assert in_flight(layout, stage, micro_batches) == simulated_peak(pipeline, virtual, stage, micro_batches)
        layers = [layers_of_chunk(KNOWN_MODELS["Qwen/Qwen2.5-32B"], layout, stage, chunk) for chunk in range(virtual)]
        assert layers == [((DENSE_LAYER, 64 // (pipeline * virtual)),)] * virtual
