"""The fused output layer: against the kernels' own constants, and against live bytes seen on the CPU."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gtpo_megatron.companions.planner import output_layer as module
from gtpo_megatron.companions.planner.output_layer import output_layer
from gtpo_megatron.distributed import vocab_parallel
from gtpo_megatron.distributed.vocab_parallel import linear_token_scores
from gtpo_megatron.kernels import tiles, torch_tiles


class LiveBytes(TorchDispatchMode):
    """Peak of the bytes of storages made while it is entered."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self._count(tensor, inputs)
        return result

    def _count(self, tensor, inputs):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in inputs:
            return
        self._known.add(key)
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key, size):
        self._known.discard(key)
        self.live -= size


def test_the_kernels_constants_are_ours():
    assert module.GPU_TILE_ELEMENTS == tiles.GPU_TILE_ELEMENTS
    assert module.CPU_TILE_ELEMENTS == tiles.CPU_TILE_ELEMENTS
    assert module.KEPT_BYTES == vocab_parallel.KEPT_BYTES
    assert module.MIN_TILE_COLUMNS == tiles.MIN_TILE_COLUMNS


@pytest.mark.parametrize("rows", [1, 7, 1000, 1024, 3072, 4096, 9999, 1 << 23])
def test_tiles_are_as_wide_as_products_like_them(rows):
    """cuBLAS has its fast kernels for widths that 8 divides."""
    columns = tiles.tile_columns(rows, torch.zeros(1))
    assert columns % tiles.MIN_TILE_COLUMNS == 0
    assert columns == tiles.MIN_TILE_COLUMNS or rows * columns <= tiles.CPU_TILE_ELEMENTS
    assert rows * (columns + tiles.MIN_TILE_COLUMNS) > tiles.CPU_TILE_ELEMENTS


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.1, 1.0, 100.0])
@pytest.mark.parametrize("chunk", [128, 512, 1024])
def test_scoring_holds_tiles_and_no_more(chunk, scale):
    """Also where nearly every row is peaked, and thus summed again."""
    tokens, hidden_size, vocab = 1024, 32, 9000
    hidden, weight = torch.randn(tokens, hidden_size), scale * torch.randn(vocab, hidden_size)
    targets = torch.randint(0, vocab, (tokens,))
    with LiveBytes() as seen, torch.no_grad():
        linear_token_scores(hidden, weight, targets, chunk_tokens=chunk)
    planned = output_layer(
        tokens=tokens,
        hidden_size=hidden_size,
        vocab_rows=vocab,
        chunk_tokens=chunk,
        weight_bytes=4,
        gathers=False,
        tile_elements=tiles.CPU_TILE_ELEMENTS,
    )
    least = planned.scoring + tokens * module.SUMS_BYTES
    # beside the tile: kernels work through blocks, one of exponentials, two of rows that are summed again
    assert least <= seen.peak <= 1.05 * least + 3 * 4 * torch_tiles.BLOCK_ELEMENTS


def test_by_hand():
    """Qwen2.5-32B, TP 8, a chunk of 1,024 tokens: the rank's 19,072 rows are one tile."""
    memory = output_layer(
        tokens=8192, hidden_size=5120, vocab_rows=19072, chunk_tokens=1024, weight_bytes=2, gathers=True
    )
    tile, hidden = 1024 * 19072 * 4, 8192 * 5120 * 2
    assert memory.saved == hidden + 8192 * 64
    assert memory.scoring == hidden + tile
    # zeros of the weight's size for autograd are more than a tile, its copy and two chunks of hidden states
    assert memory.training == 2 * hidden + 19072 * 5120 * 2
    wide = output_layer(
        tokens=8192, hidden_size=5120, vocab_rows=19072, chunk_tokens=4096, weight_bytes=2, gathers=True
    )
    tile = 4096 * 8192 * 4
    assert wide.training == 2 * hidden + tile + tile // 2 + 2 * 4096 * 5120 * 4


def test_logits_take_the_same_however_many_tokens_there_are():
    def logits(tokens):
        memory = output_layer(
            tokens=tokens, hidden_size=4096, vocab_rows=152064, chunk_tokens=2048, weight_bytes=2, gathers=False
        )
        return memory.scoring, memory.training - memory.saved

    assert logits(8192)[0] == logits(32768)[0] < 8192 * 152064
    assert logits(32768)[1] < 1.1 * logits(8192)[1]
