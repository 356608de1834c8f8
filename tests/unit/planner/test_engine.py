"""vLLM's share of the memory."""

import pytest

from gtpo_megatron.planner.engine import MIN_BATCHED_TOKENS, divides_engine, engine_memory
from gtpo_megatron.planner.known_models import KNOWN_MODELS
from gtpo_megatron.rollout import vllm_engine
from tests.unit.planner.requests import request

QWEN2_5_32B, SPARSE = KNOWN_MODELS["Qwen/Qwen2.5-32B"], KNOWN_MODELS["Qwen/Qwen3-30B-A3B"]


def memory(shape, tensor):
    return engine_memory(shape, tensor=tensor, weight_bytes=2, max_sequences=128, sequence_tokens=6144)


def test_one_gpu_holds_the_whole_model():
    for shape in KNOWN_MODELS.values():
        assert memory(shape, 1).weights == 2 * shape.num_parameters


def test_a_rank_holds_its_share_and_what_all_hold():
    shape = QWEN2_5_32B
    norms = 2 * (2 * shape.num_layers + 1) * shape.hidden_size
    assert memory(shape, 4).weights - norms == (memory(shape, 1).weights - norms) / 4


def test_cache_of_a_token_by_hand():
    assert memory(QWEN2_5_32B, 1).cache_per_token == 2 * 64 * 8 * 128 * 2
    assert memory(QWEN2_5_32B, 4).cache_per_token == 2 * 64 * 2 * 128 * 2
    # 4 key-value heads on 8 ranks: two ranks hold copies of each
    assert memory(SPARSE, 8).cache_per_token == memory(SPARSE, 4).cache_per_token == 2 * 48 * 128 * 2


def test_sequences_are_cached_in_whole_blocks():
    engine = memory(QWEN2_5_32B, 4)
    assert engine.sequences_in_cache(160 * engine.cache_per_token, 17) == 5
    assert engine.sequences_in_cache(159 * engine.cache_per_token, 17) == 4
    assert engine.sequences_in_cache(0, 17) == 0


@pytest.mark.parametrize(("shape", "fitting"), [(QWEN2_5_32B, [1, 2, 4, 8]), (SPARSE, [1, 2, 4, 8, 16, 32])])
def test_ranks_that_divide_a_model(shape, fitting):
    assert [tensor for tensor in range(1, 65) if divides_engine(shape, tensor)] == fitting


def test_the_adapters_constant_is_ours():
    assert vllm_engine.MIN_BATCHED_TOKENS == MIN_BATCHED_TOKENS


def test_engines_share_the_gpus():
    assert request(engine_tensor=4).num_engines == 16
    assert request(engine_tensor=8, num_gpus=72, num_rollout_gpus=8).num_engines == 1
