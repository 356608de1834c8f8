"""The output layer fused with the scores: what ``distributed/tiled_scores.py`` holds on the last stage."""

from dataclasses import dataclass

GPU_TILE_ELEMENTS, CPU_TILE_ELEMENTS = 1 << 25, 1 << 22
"""Elements of a tile of logits; ``kernels/tiles.py`` has the same numbers."""

KEPT_BYTES = 1 << 29
"""Of logits that are kept for the backward pass on a CPU; ``distributed/vocab_parallel.py`` has the same number."""

MIN_TILE_COLUMNS = 512
"""A tile is at least this wide, and a multiple of it."""

FLOAT32_BYTES = 4
SUMS_BYTES = 64
"""A token's softmax sums in float64, its log-prob, entropy and their gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputLayerMemory:
    """Bytes per rank of the last stage, for one micro-batch.

    Attributes:
        saved: kept from forward to backward.
        scoring: bytes at the peak of a forward pass alone, ``saved`` not included.
        training: bytes at the peak of the backward pass, ``saved`` not included.
    """

    saved: int = 0
    scoring: int = 0
    training: int = 0


def output_layer(
    *,
    tokens: int,
    hidden_size: int,
    vocab_rows: int,
    chunk_tokens: int,
    weight_bytes: int,
    gathers: bool,
    tile_elements: int = GPU_TILE_ELEMENTS,
    kept_bytes: int = 0,
) -> OutputLayerMemory:
    """Bytes of the fused output layer.

    Args:
        tokens: of a micro-batch on this rank; all of them are taken to be response tokens.
        hidden_size: of the model.
        vocab_rows: of the output layer on this rank.
        chunk_tokens: tokens whose logits are made together.
        weight_bytes: per element of hidden states and weights.
        gathers: sequence parallelism splits hidden states, which are gathered here.
        tile_elements: logits of one tile.
        kept_bytes: if all logits take no more, they are kept for the backward pass.
    """
    chunk = min(chunk_tokens, tokens)
    whole = tile_elements // max(1, chunk) // MIN_TILE_COLUMNS
    columns = min(vocab_rows, max(1, whole) * MIN_TILE_COLUMNS)
    tile = chunk * columns * FLOAT32_BYTES
    hidden = tokens * hidden_size * weight_bytes
    gathered = hidden if gathers else 0
    low_precision_tile = chunk * columns * weight_bytes if weight_bytes < FLOAT32_BYTES else 0
    # autograd is handed zeros of the weight's size, so that Megatron's hook fires
    zeros = vocab_rows * hidden_size * weight_bytes
    logits = tokens * vocab_rows * FLOAT32_BYTES
    kept = logits if logits <= kept_bytes else 0
    hidden_chunk = 2 * chunk * hidden_size * FLOAT32_BYTES
    return OutputLayerMemory(
        saved=hidden + tokens * SUMS_BYTES,
        scoring=gathered + tile,
        training=kept + hidden + gathered + max(zeros, tile + low_precision_tile + hidden_chunk),
    )
