"""vLLM's share of the memory."""

import pytest

from gtpo_megatron.companions.planner.engine import MIN_BATCHED_TOKENS, divides_engine, engine_memory
from gtpo_megatron.companions.planner.known_models import KNOWN_MODELS
from gtpo_megatron.rollout import engine_arguments
from tests.unit.companions.planner.requests import request

QWEN2_5_32B, SPARSE = KNOWN_MODELS["Qwen/Qwen2.5-32B"], KNOWN_MODELS["Qwen/Qwen3-30B-A3B"]
MIXED = KNOWN_MODELS["zai-org/GLM-4.5-Air"]
DELTA = KNOWN_MODELS["Qwen/Qwen3-Next-80B-A3B"]
LATENT = KNOWN_MODELS["deepseek-ai/DeepSeek-V3"]


def memory(shape, tensor, **options):
    return engine_memory(shape, tensor=tensor, weight_bytes=2, max_sequences=128, sequence_tokens=6144, **options)


def test_one_gpu_holds_the_whole_model():
    for shape in KNOWN_MODELS.values():
        padding = -shape.vocab_size % 64 * shape.hidden_size * (1 if shape.tied_embeddings else 2)
        assert memory(shape, 1).weights == 2 * (shape.num_parameters + padding)


def test_a_rank_holds_its_share_and_what_all_hold():
    shape = QWEN2_5_32B
    norms = 2 * (2 * shape.num_layers + 1) * shape.hidden_size
    assert memory(shape, 4).weights - norms == (memory(shape, 1).weights - norms) / 4


@pytest.mark.parametrize("shape", [QWEN2_5_32B, MIXED, LATENT])
@pytest.mark.parametrize("stages", [2, 4])
def test_the_largest_stage_has_its_layers_and_an_end(shape, stages):
    """Embedding or output layer, and no more layers than the longest stage; keys and values of those alone."""
    whole, stage = memory(shape, 8), memory(shape, 8, stages=stages)
    longest = -(-shape.num_layers // stages)
    end = 2 * (-(-shape.vocab_size // 64) * 64 // 8 + 1) * shape.hidden_size  # and the last norm
    assert whole.weights / stages < stage.weights <= longest * whole.layer + end
    assert stage.expert_weights <= whole.expert_weights * longest // max(1, shape.num_expert_layers)
    assert stage.cache_per_token == longest * whole.cache_per_token // shape.num_layers
    assert (stage.layer, stage.layer_experts) == (whole.layer, whole.layer_experts)


@pytest.mark.parametrize("shape", [SPARSE, MIXED])
def test_experts_are_shared_whole_or_in_part(shape):
    parts, whole = memory(shape, 8), memory(shape, 8, expert_parallel=True)
    experts = shape.num_expert_layers * shape.experts.num_experts * shape.expert_parameters
    assert parts.expert_weights == whole.expert_weights == 2 * experts // 8
    assert parts.weights == whole.weights
    assert parts.weights < memory(shape, 1).weights / 4  # routers, norms and copied heads are on every rank


@pytest.mark.parametrize(("shape", "tensor"), [(QWEN2_5_32B, 4), (SPARSE, 2), (LATENT, 16)])
def test_layers_in_fp8_take_half_and_arrive_whole(shape, tensor):
    """Embedding and output layer stay as they are; the layer that is being loaded is there in both dtypes."""
    whole, rounded = memory(shape, tensor), memory(shape, tensor, layer_bytes=1)
    ends = 2 * 2 * (-(-shape.vocab_size // 64) * 64 // tensor) * shape.hidden_size
    assert rounded.weights == pytest.approx((whole.weights - ends) / 2 + ends, rel=1e-4)
    assert rounded.expert_weights == whole.expert_weights / 2
    assert rounded.arriving == whole.arriving == whole.weights
    assert rounded.layer == whole.layer * (1 if shape is QWEN2_5_32B else 1.5)  # its embedding is larger than a layer
    assert (rounded.cache_per_token, rounded.workspace) == (whole.cache_per_token, whole.workspace)


def test_a_push_brings_all_experts_of_a_layer():
    """In the shapes of a model folder: all of them if their matrices are cut, else those of the rank."""
    layer = 2 * 128 * 3 * 2048 * 768
    assert memory(SPARSE, 4).layer_experts == layer
    assert memory(SPARSE, 4, expert_parallel=True).layer_experts == layer // 4
    assert memory(QWEN2_5_32B, 4).layer_experts == 0
    assert memory(SPARSE, 1).layer > layer


def test_cache_of_a_token_by_hand():
    assert memory(QWEN2_5_32B, 1).cache_per_token == 2 * 64 * 8 * 128 * 2
    assert memory(QWEN2_5_32B, 4).cache_per_token == 2 * 64 * 2 * 128 * 2
    # 4 key-value heads on 8 ranks: two ranks hold copies of each
    assert memory(SPARSE, 8).cache_per_token == memory(SPARSE, 4).cache_per_token == 2 * 48 * 128 * 2
    # a latent is whole on every rank
    assert memory(LATENT, 1).cache_per_token == memory(LATENT, 8).cache_per_token == 61 * (512 + 64) * 2


def test_states_of_delta_nets_by_hand():
    """Keys and values of twelve layers; a float32 state of each of the others, in blocks of whole 16s that hold one."""
    whole, eighth = memory(DELTA, 1), memory(DELTA, 8)
    assert whole.cache_per_token == 2 * 12 * 2 * 256 * 2
    assert eighth.cache_per_token == 2 * 12 * 256 * 2  # two key-value heads, copied
    state = 2 * 32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128)  # in elements of two bytes
    for engine, workers, heads in ((whole, 1, 2), (eighth, 8, 1)):
        of_layer = 2 * heads * 256
        assert engine.block_tokens % 16 == 0
        assert (engine.block_tokens - 16) * of_layer < state / workers <= engine.block_tokens * of_layer
        assert engine.state_per_sequence == 36 * engine.block_tokens * of_layer * 2
    assert (whole.block_tokens, eighth.block_tokens) == (1056, 272)
    a_sequence = 23 * 272 * eighth.cache_per_token + eighth.state_per_sequence  # of 6,144 tokens
    assert eighth.sequences_in_cache(5 * a_sequence, 6144) == 5
    assert eighth.sequences_in_cache(5 * a_sequence - 1, 6144) == 4
    assert memory(MIXED, 1).state_per_sequence == 0


def test_gates_and_projections_of_a_rank_with_delta_nets():
    """Of eight ranks each has a share of every projection, and all norms, routers and gates of shared experts."""
    norms = 48 * 2 * 2048 + 2048 + 36 * 128 + 12 * 2 * 256
    whole = norms + 48 * (512 + 1) * 2048
    copies = 12 * 6 * 2 * 256 * 2048  # of eight copies of two key-value heads, all but two
    assert 8 * memory(DELTA, 8).weights == 2 * (DELTA.num_parameters + 7 * whole + copies)


def test_sequences_are_cached_in_whole_blocks():
    engine = memory(QWEN2_5_32B, 4)
    assert engine.sequences_in_cache(160 * engine.cache_per_token, 17) == 5
    assert engine.sequences_in_cache(159 * engine.cache_per_token, 17) == 4
    assert engine.sequences_in_cache(0, 17) == 0


@pytest.mark.parametrize(
    ("shape", "expert_parallel", "fitting"),
    [
        (DELTA, False, [1, 2, 4, 8, 16]),
        (QWEN2_5_32B, False, [1, 2, 4, 8]),
        (SPARSE, False, [1, 2, 4, 8, 16, 32]),
        (MIXED, False, [1, 2, 4, 8, 16, 32]),
        # 160 experts, but shared ones of 1,536 columns, and 96 heads
        (KNOWN_MODELS["zai-org/GLM-4.5"], True, [1, 2, 4, 8, 16, 32]),
    ],
)
def test_ranks_that_divide_a_model(shape, expert_parallel, fitting):
    found = [tensor for tensor in range(1, 65) if divides_engine(shape, tensor, expert_parallel=expert_parallel)]
    assert found == fitting


def test_the_adapters_constant_is_ours():
    assert engine_arguments.MIN_BATCHED_TOKENS == MIN_BATCHED_TOKENS


def test_engines_share_the_gpus():
    assert request(engine_tensor=4).num_engines == 16
    assert request(engine_tensor=8, num_gpus=72, num_rollout_gpus=8).num_engines == 1
