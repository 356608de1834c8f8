"""vLLM's memory: weights as it splits them, the key-value cache, and its workspace."""

from dataclasses import dataclass
from functools import lru_cache

from gtpo_megatron.planner.shape import ModelShape

VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this."""

BLOCK_TOKENS = 16
"""Tokens of a block of the key-value cache."""

MIN_BATCHED_TOKENS = 8192
"""Prompt tokens that vLLM runs through the model at once, at least; ``rollout/vllm_engine.py`` has the same number."""

LOGITS_COPIES = 4
"""Float32 ``[sequences, vocabulary]`` tensors alive while sampling with log-probs: logits, scaled, log-probs, sorted or
exponentials."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """Bytes on one GPU of an engine.

    Attributes:
        weights: of its share.
        layer: of its share of one layer or of the embedding: vLLM reloads piece by piece, and holds a piece twice.
        cache_per_token: keys and values of one token, its share.
        workspace: activations of one forward pass and the sampler's logits.
    """

    weights: int
    layer: int
    cache_per_token: int
    workspace: int

    def sequences_in_cache(self, cache_bytes: int, sequence_tokens: int) -> int:
        """How many sequences of full length fit."""
        blocks = -(-sequence_tokens // BLOCK_TOKENS)
        return cache_bytes // (blocks * BLOCK_TOKENS * self.cache_per_token)


@lru_cache(maxsize=64)
def engine_memory(
    shape: ModelShape, *, tensor: int, weight_bytes: int, max_sequences: int, sequence_tokens: int
) -> EngineMemory:
    """Memory of one rank of an engine.

    Args:
        shape: of the model.
        tensor: ranks of the engine; must divide the query heads and divide, or be divided by, the key-value heads.
        weight_bytes: of an element of weights, activations and cache.
        max_sequences: decoded together.
        sequence_tokens: of the longest prompt and response.
    """
    groups = max(1, shape.num_query_groups // tensor)  # key-value heads are copied if ranks outnumber them
    heads = shape.num_heads // tensor
    qkv = (heads + 2 * groups) * shape.head_size
    hidden = shape.hidden_size
    attention = hidden * (qkv + heads * shape.head_size) + qkv * shape.qkv_bias
    norms = 2 * hidden + 2 * shape.head_size * shape.qk_norm
    if shape.experts is None:
        mlp, width = 3 * hidden * shape.ffn_size // tensor, shape.ffn_size // tensor
    else:
        experts = shape.experts
        mlp = experts.num_experts * (3 * hidden * experts.ffn_size // tensor + hidden)
        width = experts.experts_per_token * experts.ffn_size // tensor
    layer = attention + norms + mlp
    rows = -(-shape.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    vocabulary = (1 if shape.tied_embeddings else 2) * (rows // tensor) * hidden
    workspace = max(MIN_BATCHED_TOKENS, sequence_tokens) * (4 * hidden + qkv + 3 * width) * weight_bytes
    return EngineMemory(
        weights=(shape.num_layers * layer + vocabulary + hidden) * weight_bytes,
        layer=max(layer, (rows // tensor) * hidden) * weight_bytes,
        cache_per_token=2 * shape.num_layers * groups * shape.head_size * weight_bytes,
        workspace=workspace + LOGITS_COPIES * max_sequences * shape.vocab_size * 4,
    )


def divides_engine(shape: ModelShape, tensor: int) -> bool:
    """Whether vLLM can split the model over so many ranks."""
    groups = shape.num_query_groups
    if shape.num_heads % tensor or (groups % tensor and tensor % groups):
        return False
    width = shape.ffn_size if shape.experts is None else shape.experts.ffn_size
    return width % tensor == 0
