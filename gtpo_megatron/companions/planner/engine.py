"""vLLM's memory: weights as it splits them, the key-value cache, and its workspace."""

from dataclasses import dataclass
from functools import lru_cache

from gtpo_megatron.config.parallel import engine_layers
from gtpo_megatron.weights.model_shape import LayerKind, ModelShape

VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this."""

BLOCK_TOKENS = 16
"""Tokens of a block of the key-value cache."""

STATE_BYTES = 4
"""Of an element of a delta net's matrix: ``rollout/cache_size.py`` names the dtype."""

MIN_BATCHED_TOKENS = 8192
"""Least number of prompt tokens that vLLM runs through the model at once; as in ``rollout/engine_arguments``."""

LOGITS_COPIES = 4
"""Float32 ``[sequences, vocabulary]`` tensors alive while sampling with log-probs: logits, scaled, log-probs, sorted or
exponentials."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """Bytes on one GPU of an engine; of pipeline stages the largest of each.

    Attributes:
        weights: bytes of its share of the weights.
        expert_weights: part of ``weights`` that is the experts'.
        arriving: its share of the weights as a push brings them.
        layer: its share of the largest layer or of the embedding: vLLM reloads piece by piece, and holds a piece
            twice, in FP8 also as it arrives.
        layer_experts: one layer's experts as they arrive in a push, in the shapes of a model folder: vLLM collects
            them all before it cuts out its share.
        cache_per_token: keys and values of one token, its share.
        block_tokens: tokens of a block of the cache.
        state_per_sequence: state of delta nets for a sequence, however long it is.
        workspace: activations of one forward pass and the sampler's logits.
    """

    weights: int
    expert_weights: int
    arriving: int
    layer: int
    layer_experts: int
    cache_per_token: int
    block_tokens: int
    state_per_sequence: int
    workspace: int

    def bytes_of_sequence(self, tokens: float) -> float:
        """Bytes that a sequence has in the cache."""
        return tokens * self.cache_per_token + self.state_per_sequence

    def moved_by_step(self, tokens: float) -> float:
        """Bytes that a decode step moves of a sequence: it reads keys and values, and reads and writes states."""
        return self.bytes_of_sequence(tokens) + self.state_per_sequence

    def bytes_in_blocks(self, tokens: int) -> int:
        """Bytes of the cache's blocks that a sequence has, the last one whole."""
        blocks = -(-tokens // self.block_tokens)
        return blocks * self.block_tokens * self.cache_per_token + self.state_per_sequence

    def sequences_in_cache(self, cache_bytes: int, sequence_tokens: int) -> int:
        """Number of sequences of full length that the cache holds."""
        return cache_bytes // self.bytes_in_blocks(sequence_tokens)


@lru_cache(maxsize=64)
def engine_memory(
    shape: ModelShape,
    *,
    tensor: int,
    stages: int = 1,
    weight_bytes: int,
    layer_bytes: int | None = None,
    max_sequences: int,
    sequence_tokens: int,
    expert_parallel: bool = False,
) -> EngineMemory:
    """Memory of one rank of an engine.

    Args:
        shape: of the model.
        tensor: ranks that share a layer; must divide the query heads and divide, or be divided by, the key-value heads.
        stages: of its pipeline.
        weight_bytes: of an element of weights, activations and cache.
        layer_bytes: of an element of the weights of layers, if that is another number. Norms and routers, which keep
            theirs, and scales of FP8 are a thousandth of a layer.
        max_sequences: decoded together.
        sequence_tokens: of the longest prompt and response.
        expert_parallel: the ranks share a layer's experts, each whole, instead of the matrices of every expert.
    """
    hidden, layers = shape.hidden_size, shape.layers_between(0, shape.num_layers)
    of_stages = [engine_layers(shape.num_layers, stages, stage) for stage in range(stages)]
    has_dense = any(not kind.has_experts for kind, _ in layers)
    width, sparse, experts, arriving = shape.ffn_size // tensor, 0, 0, 0
    if shape.experts is not None:
        experts = shape.experts.num_experts * shape.expert_parameters // tensor
        arriving = shape.experts.num_experts * shape.expert_parameters // (tensor if expert_parallel else 1)
        shared = 3 * hidden * shape.experts.shared_ffn_size // tensor
        router = shape.experts.num_experts * (hidden + (shape.experts.clamp > 0))
        sparse = router + shared + hidden * shape.experts.has_shared_gate + experts
        # buffers for every copy of a token: of its own experts' alone, vLLM does not know how many there will be
        columns = shape.experts.ffn_size // (1 if expert_parallel else tensor)
        width = max(width * has_dense, shape.experts.experts_per_token * (columns + hidden // 3))
    rows = -(-shape.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    vocabulary = (rows // tensor) * hidden
    dense = shape.dense_mlp_parameters // tensor
    sizes = {kind: _attention(shape, kind, tensor) + (sparse if kind.has_experts else dense) for kind, _ in layers}
    projected = max(_projected(shape, kind, tensor) for kind in sizes)
    workspace = max(MIN_BATCHED_TOKENS, sequence_tokens) * (4 * hidden + projected + 3 * width) * weight_bytes
    # vLLM gives all stages as many blocks as the one with the most layers has room for
    cache = -(-shape.cached_elements(tensor) * max(map(len, of_stages)) // shape.num_layers) * weight_bytes
    block = shape.cache_block(tensor, BLOCK_TOKENS, state_width=STATE_BYTES // weight_bytes)
    held = [shape.layers_between(one.start, one.stop) for one in of_stages]
    ends = [0] * stages
    ends[0] += vocabulary
    ends[-1] += hidden + vocabulary * (stages > 1 or not shape.tied_embeddings)
    of_layer = weight_bytes if layer_bytes is None else layer_bytes
    in_layers, end, with_experts = max(
        (
            (
                sum(count * sizes[kind] for kind, count in counts),
                end,
                sum(count for kind, count in counts if kind.has_experts),
            )
            for counts, end in zip(held, ends, strict=True)
        ),
        key=lambda stage: stage[0] * of_layer + stage[1] * weight_bytes,
    )
    is_rounded = of_layer < weight_bytes
    return EngineMemory(
        weights=in_layers * of_layer + end * weight_bytes,
        expert_weights=with_experts * experts * of_layer,
        arriving=(in_layers + end) * weight_bytes,
        layer=max(
            max(sizes.values()) * (weight_bytes + of_layer * is_rounded), (rows // tensor) * hidden * weight_bytes
        ),
        layer_experts=arriving * weight_bytes,
        cache_per_token=cache,
        block_tokens=block,
        state_per_sequence=shape.state_blocks * block * cache,
        workspace=workspace + LOGITS_COPIES * max_sequences * shape.vocab_size * 4,
    )


def _attention(shape: ModelShape, kind: LayerKind, tensor: int) -> int:
    """Elements of a layer's attention or delta net, and of its norms."""
    hidden, delta = shape.hidden_size, shape.delta
    if kind.has_delta_net and delta is not None:
        elements = (sum(delta.matrices(hidden, 1)) + 2 * delta.num_value_heads) // tensor + delta.value_size
        return elements + shape.norms_per_layer * hidden
    if shape.latents is not None:
        return sum(shape.attention_tensors(kind, tensor))
    qkv, heads = _projected(shape, kind, tensor), shape.num_heads // tensor
    elements = hidden * (qkv + heads * shape.head_size) + qkv * shape.qkv_bias
    norms = shape.norms_per_layer * hidden + sum(shape.qk_norm_sizes)
    return elements + norms + (hidden + heads) * shape.has_sinks


def _projected(shape: ModelShape, kind: LayerKind, tensor: int) -> int:
    """Columns of queries, keys, values and gates of outputs; key-value heads are copied if ranks outnumber them."""
    if kind.has_delta_net and shape.delta is not None:
        return (shape.delta.conv_width + shape.delta.value_width) // tensor
    groups, heads = max(1, shape.num_query_groups // tensor), shape.num_heads // tensor
    return ((2 if shape.has_output_gate else 1) * heads + 2 * groups) * shape.head_size


def divides_engine(shape: ModelShape, tensor: int, *, expert_parallel: bool = False) -> bool:
    """Whether vLLM can split the model over so many ranks."""
    groups = shape.num_query_groups
    if shape.num_heads % tensor or (groups % tensor and tensor % groups):
        return False
    if shape.delta is not None and shape.delta.num_key_heads % tensor:
        return False
    widths = [shape.ffn_size] if shape.num_expert_layers < shape.num_layers else []
    if shape.experts is not None:
        shared = shape.experts.num_experts if expert_parallel else shape.experts.ffn_size
        widths += [shape.experts.shared_ffn_size, shared]
    return not any(width % tensor for width in widths)
