"""Weights, gradients and optimizer of every rank against Megatron's own classes, in a fake world of 64 ranks."""

from dataclasses import replace

import pytest

from gtpo_megatron.companions.planner.known_models import KNOWN_MODELS
from gtpo_megatron.companions.planner.layout import Layout, layers_of_stage, layouts
from gtpo_megatron.companions.planner.trainer_state import stage_parameters, trainer_state
from gtpo_megatron.weights.experts import Experts
from gtpo_megatron.weights.model_shape import DeltaNet, ModelShape
from tests.dist_utils import run_processes
from tests.unit.companions.planner import real_megatron

QWEN2_5_32B = KNOWN_MODELS["Qwen/Qwen2.5-32B"]
SPARSE = KNOWN_MODELS["Qwen/Qwen3-30B-A3B"]
DELTA = KNOWN_MODELS["Qwen/Qwen3-Next-80B-A3B"]
MIXED = ModelShape(
    num_layers=12,
    hidden_size=256,
    ffn_size=640,
    num_heads=8,
    num_query_groups=4,
    head_size=32,
    vocab_size=5003,
    max_positions=4096,
    experts=Experts(
        num_experts=8,
        experts_per_token=2,
        ffn_size=100,
        layers=(False, True, True) * 4,
        shared_ffn_size=72,
        score="sigmoid",
        has_bias=True,
    ),
)
SMALL_DELTA = replace(
    MIXED,
    qk_norm=True,
    has_output_gate=True,
    delta=DeltaNet(
        num_key_heads=2,
        num_value_heads=6,
        key_size=16,
        value_size=40,
        conv_size=4,
        layers=(True, False, True, True) * 3,
    ),
    experts=replace(MIXED.experts, score="softmax", has_bias=False, has_shared_gate=True),
)
TIED = ModelShape(
    num_layers=8,
    hidden_size=256,
    ffn_size=640,
    num_heads=8,
    num_query_groups=4,
    head_size=32,
    vocab_size=5003,
    max_positions=4096,
    tied_embeddings=True,
    qkv_bias=True,
)


def layout(**sizes):
    return Layout(num_ranks=64, sequence_parallel=sizes.get("tensor", 1) > 1, **sizes)


CASES = [
    # the paper's model
    (QWEN2_5_32B, layout(tensor=8, pipeline=4), 2, 128),
    (QWEN2_5_32B, layout(tensor=4, pipeline=4, last_layers=13), 2, 128),
    (QWEN2_5_32B, layout(pipeline=8), 4, 128),
    (QWEN2_5_32B, layout(tensor=8, pipeline=4, distributed_optimizer=False), 2, 128),
    # norms of queries and keys
    (KNOWN_MODELS["Qwen/Qwen3-32B"], layout(tensor=8, pipeline=2, context=2), 2, 128),
    # experts: over part of the ranks, with matrices that are shared or not, with dense layers before
    (SPARSE, layout(tensor=4, pipeline=2, expert=8), 2, 128),
    (KNOWN_MODELS["zai-org/GLM-4.5-Air"], layout(tensor=4, pipeline=2, expert=8), 2, 128),
    (MIXED, layout(tensor=2, pipeline=2, virtual=3, expert=4, expert_tensor=2), 2, 1),
    # multi-latent attention, with queries of low rank
    (KNOWN_MODELS["deepseek-ai/DeepSeek-V3"], layout(tensor=4, pipeline=4, last_layers=13, expert=16), 2, 128),
    # sinks, and biases of experts and routers
    (KNOWN_MODELS["openai/gpt-oss-20b"], layout(tensor=2, expert=8), 2, 128),
    # delta nets in three of four layers: of stages that differ
    (DELTA, layout(pipeline=16, expert=4), 2, 128),
    (SMALL_DELTA, layout(tensor=2, pipeline=2, distributed_optimizer=False), 4, 1),
    # a tied embedding: one copy where there is one stage, a bucket of its own on both ends of a pipeline
    (TIED, layout(tensor=2), 2, 1),
    (TIED, layout(tensor=2, pipeline=4), 2, 1),
]


MORE_CASES = [
    (QWEN2_5_32B, layout(tensor=4, pipeline=4), 2, 128),
    (QWEN2_5_32B, layout(tensor=4, pipeline=4, virtual=2), 2, 128),
    (QWEN2_5_32B, layout(tensor=2, pipeline=16, context=2), 2, 128),
    (QWEN2_5_32B, layout(tensor=8), 2, 128),
    (KNOWN_MODELS["Qwen/Qwen2.5-72B"], layout(tensor=8, pipeline=8), 2, 128),
    (KNOWN_MODELS["meta-llama/Llama-3.1-8B"], layout(tensor=2), 2, 128),
    (SPARSE, layout(tensor=2, expert=32), 2, 128),  # experts over all ranks
    (SPARSE, layout(tensor=2, pipeline=4, context=2, expert=16, distributed_optimizer=False), 2, 128),
    (KNOWN_MODELS["Qwen/Qwen3-235B-A22B"], layout(tensor=4, pipeline=2, expert=32), 2, 128),
    (KNOWN_MODELS["moonshotai/Moonlight-16B-A3B"], layout(tensor=2, expert=8), 2, 128),
    (KNOWN_MODELS["openai/gpt-oss-120b"], layout(tensor=8, pipeline=4, expert=8), 2, 128),
    (DELTA, layout(tensor=2, pipeline=4, expert=8), 2, 128),
    (MIXED, layout(tensor=4, pipeline=4, expert=2), 4, 1),
    (MIXED, layout(tensor=2, pipeline=2, virtual=2, last_layers=4, expert=4), 2, 1),
    (TIED, layout(pipeline=2, distributed_optimizer=False), 4, 1),
    (SPARSE, layout(tensor=4, pipeline=2, expert=4, expert_tensor=2), 2, 128),
    (SPARSE, layout(tensor=4, pipeline=8, expert_tensor=4), 2, 128),
    (KNOWN_MODELS["zai-org/GLM-4.5"], layout(tensor=8, pipeline=4, expert=16), 2, 128),
    # every thirteenth layout of a small model
    *((MIXED, case, 2, 1) for case in list(layouts(MIXED, num_ranks=64, gpus_per_node=8))[::13]),
]


def ranks_of_interest(case):
    """The first and the last rank of the first, second and last stage."""
    size = case.num_ranks // case.pipeline
    stages = sorted({0, min(1, case.pipeline - 1), case.pipeline - 1})
    return [(stage, rank) for stage in stages for rank in (stage * size, (stage + 1) * size - 1)]


def measure(rank, world_size, init_method, cases):
    return [
        [
            real_megatron.rank_bytes(shape, case, rank, weight_bytes=weight_bytes, vocab_multiple=multiple)
            for _, rank in ranks_of_interest(case)
        ]
        for shape, case, weight_bytes, multiple in cases
    ]


@pytest.fixture(scope="module")
def measured():
    return run_processes(measure, 1, CASES, timeout_s=400.0)[0]


def assert_equal(case_of_model, ranks):
    """What is planned for the ranks of interest is what Megatron allocates, to the byte.

    Vectors of less than 64 elements leave gaps in the optimizer's buffers, which are not planned.
    """
    shape, case, weight_bytes, multiple = case_of_model
    gaps = {"optimizer": 1e-6 if shape.has_sinks or shape.delta is not None else 0.0}
    for (stage, rank), real in zip(ranks_of_interest(case), ranks, strict=True):
        planned = trainer_state(stage_parameters(shape, case, stage, multiple), case, weight_bytes=weight_bytes)
        for part in ("weights", "gradients", "optimizer"):
            expected = getattr(real, part)
            assert expected > 0
            found = pytest.approx(getattr(planned, part), rel=gaps.get(part, 0.0), abs=0)
            assert expected == found, f"{part} of rank {rank} of {case}"
        assert planned.routers == real.routers, f"routers of rank {rank} of {case}"
        assert (planned.routers > 0) == any(kind.has_experts for kind, _ in layers_of_stage(shape, case, stage))


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.timeout(420)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=[f"{case} of {shape.num_layers}" for shape, case, *_ in CASES]
)
def test_every_rank_holds_what_megatron_allocates(measured, number):
    assert_equal(CASES[number], measured[number])


@pytest.mark.nightly
@pytest.mark.megatron
@pytest.mark.timeout(920)
@pytest.mark.filterwarnings("ignore")
def test_every_rank_holds_what_megatron_allocates_in_many_more_layouts():
    ranks = run_processes(measure, 1, MORE_CASES, timeout_s=900.0)[0]
    assert len(MORE_CASES) > 100
    for case, measured_of_case in zip(MORE_CASES, ranks, strict=True):
        assert_equal(case, measured_of_case)


def test_a_rank_holds_less_with_every_axis_that_shares():
    def total(**sizes):
        case = layout(**sizes)
        state = trainer_state(stage_parameters(QWEN2_5_32B, case, 0, 128), case, weight_bytes=2)
        return state.weights + state.gradients + state.optimizer

    assert total(tensor=8) < total(tensor=4) < total(tensor=2)
    assert total(tensor=4, pipeline=4) < total(tensor=4, pipeline=2) < total(tensor=4)
    assert total(tensor=4) < total(tensor=4, distributed_optimizer=False)
    # context parallelism shares no weights, and the optimizer is split over data x context either way
    assert total(tensor=4, context=4) == total(tensor=4)


def test_an_offloaded_optimizer_is_on_the_host():
    def state(fraction):
        case = layout(tensor=8, pipeline=4)
        return trainer_state(
            stage_parameters(QWEN2_5_32B, case, 0, 128), case, weight_bytes=2, offload_fraction=fraction
        )

    assert state(0).optimizer_on_host == state(1).optimizer == 0
    assert state(0.5).optimizer == pytest.approx(state(0).optimizer / 2, rel=1e-6)
    # float32 weights, two moments, and the gradients that Adam reads there
    assert state(1).optimizer_on_host == pytest.approx(state(0).optimizer * 16 / 12, rel=1e-6)
    assert state(1).gradients == state(0).gradients


def test_experts_are_split_over_expert_ranks_and_nothing_else_is():
    shape = KNOWN_MODELS["Qwen/Qwen3-30B-A3B"]
    one, eight = (stage_parameters(shape, layout(tensor=2, expert=e), 0, 128) for e in (1, 8))
    assert one.dense == eight.dense
    assert one.num_expert_elements == 8 * eight.num_expert_elements
    assert one.num_expert_elements == shape.num_layers * 128 * 3 * 2048 * 768
    shared = stage_parameters(shape, layout(tensor=2, expert=8, expert_tensor=2), 0, 128)
    assert shared.dense == one.dense
    assert 2 * shared.num_expert_elements == eight.num_expert_elements


def test_experts_are_replicated_over_fewer_ranks():
    case = layout(tensor=4, pipeline=2, context=2, expert=8)
    parameters = stage_parameters(SPARSE, case, 0, 128)
    assert parameters.replicated(case) == (
        (parameters.num_elements - parameters.num_expert_elements, 8),
        (parameters.num_expert_elements, 4),
    )
