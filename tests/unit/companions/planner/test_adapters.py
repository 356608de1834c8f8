"""Adapters of every rank against Megatron's own classes, and what they leave of a plan."""

import pytest

from gtpo_megatron.companions.planner.adapters import adapted_state, adapter_parameters
from gtpo_megatron.companions.planner.known_models import KNOWN_MODELS
from gtpo_megatron.companions.planner.layout import Layout
from gtpo_megatron.companions.planner.trainer_state import stage_parameters
from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.weights.adapter_shapes import num_parameters
from tests.dist_utils import run_processes
from tests.unit.companions.planner import real_megatron
from tests.unit.companions.planner.test_trainer_state import MIXED, QWEN2_5_32B, SPARSE, TIED, ranks_of_interest

EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def layout(num_ranks=8, **sizes):
    sizes = {"distributed_optimizer": True} | sizes
    return Layout(num_ranks=num_ranks, sequence_parallel=sizes.get("tensor", 1) > 1, **sizes)


CASES = [
    (QWEN2_5_32B, layout(tensor=8), 2, AdapterConfig(rank=32)),
    (QWEN2_5_32B, layout(tensor=4, pipeline=2), 2, AdapterConfig(rank=32, dtype="float32")),
    (QWEN2_5_32B, layout(tensor=4, pipeline=2, distributed_optimizer=False), 2, AdapterConfig(rank=16)),
    (KNOWN_MODELS["Qwen/Qwen3-32B"], layout(tensor=2, pipeline=2, virtual=2), 2, AdapterConfig(rank=7)),
    (SPARSE, layout(tensor=2, expert=8), 2, AdapterConfig(rank=32, targets=ATTENTION)),
    (MIXED, layout(pipeline=2, expert=4), 4, AdapterConfig(rank=8, targets=("v_proj",))),
    (
        KNOWN_MODELS["moonshotai/Moonlight-16B-A3B"],
        layout(tensor=2, expert=8),
        2,
        AdapterConfig(rank=8, targets=("q_proj", "kv_b_proj", "o_proj")),
    ),
    (SPARSE, layout(tensor=2, expert=8), 2, AdapterConfig(rank=8, targets=("q_proj", *EXPERTS))),
    (MIXED, layout(pipeline=2, expert=4, distributed_optimizer=False), 4, AdapterConfig(rank=8, targets=EXPERTS[:1])),
    (KNOWN_MODELS["deepseek-ai/DeepSeek-V2-Lite"], layout(tensor=2, expert=4), 2, AdapterConfig(rank=8)),
    (TIED, layout(tensor=2, pipeline=2), 2, AdapterConfig(rank=4, targets=("up_proj", "down_proj"))),
]


def measure_all(rank, world_size, init_method):
    return [
        [
            real_megatron.rank_bytes(shape, case, rank, weight_bytes=weight_bytes, vocab_multiple=128, adapter=adapter)
            for _, rank in ranks_of_interest(case)
        ]
        for shape, case, weight_bytes, adapter in CASES
    ]


@pytest.mark.nightly
@pytest.mark.megatron
@pytest.mark.timeout(420)
@pytest.mark.filterwarnings("ignore")
def test_every_rank_holds_what_megatron_allocates():
    [measured] = run_processes(measure_all, 1, timeout_s=400.0)
    for (shape, case, weight_bytes, adapter), ranks in zip(CASES, measured, strict=True):
        element_bytes = 4 if adapter.dtype == "float32" else weight_bytes
        for (stage, rank), real in zip(ranks_of_interest(case), ranks, strict=True):
            frozen = stage_parameters(shape, case, stage, 128)
            adapters = adapter_parameters(shape, case, stage, adapter)
            planned = adapted_state(frozen, adapters, case, weight_bytes=weight_bytes, adapter_bytes=element_bytes)
            for part in ("weights", "gradients", "optimizer", "routers"):
                assert getattr(planned, part) == getattr(real, part), f"{part} of rank {rank} of {case}"


@pytest.mark.parametrize("shape", [QWEN2_5_32B, TIED])
def test_the_planner_counts_what_the_checkpoints_have(shape):
    adapter = AdapterConfig(rank=32)
    planned = adapter_parameters(shape, layout(1, distributed_optimizer=False), 0, adapter)
    assert planned.num_elements == num_parameters(real_megatron._architecture(shape), adapter)
