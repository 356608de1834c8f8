"""The fused output layer on tensors that say they are a GPU's: what it allocates, and that it never waits for the GPU.

Nothing is computed: torch follows shapes, dtypes and devices (``FakeTensorMode``), and the two kernels are not run.
"""

import contextlib
import weakref
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gtpo_megatron.distributed import input_checks, tiled_scores, vocab_parallel
from gtpo_megatron.kernels.tiles import GPU_TILE_ELEMENTS, TileKernels

TOKENS, HIDDEN, VOCAB = 8192, 5120, 38016
"""Of a micro-batch of Qwen2.5-32B, with a quarter of its vocabulary."""

CHUNK = 2048

TILE = 4 * GPU_TILE_ELEMENTS
"""Bytes of a tile of logits in float32."""

WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::masked_select", "aten::equal")
"""Calls whose result the host must have before it goes on."""

COPIES = ("aten::copy_", "aten::_to_copy")
"""Wait if they are from one device to another, whose memory is not pinned."""


@dataclass
class Watch(TorchDispatchMode):
    """Follows allocations and waits.

    Attributes:
        live: bytes of new storages that are held now.
        peak: most of them at once.
        waits: calls that the host waits in.
    """

    live: int = 0
    peak: int = 0
    waits: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._seen.add(tensor.untyped_storage()._cdata)  # it was there before
        result = func(*args, **(kwargs or {}))
        name = func.name().split(".")[0]
        devices = {leaf.device.type for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)}
        if name in WAITS or (name in COPIES and len(devices) > 1):
            self.waits.append(f"{name} {devices}")
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor)
        return result

    def _follow(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._seen:
            return
        self._seen.add(storage._cdata)
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, storage._cdata, size)

    def _free(self, place: int, size: int) -> None:
        self._seen.discard(place)
        self.live -= size


@contextlib.contextmanager
def fake_kernels():
    """Kernels that only note that they were called, and inputs that nobody checks: the checks wait, once a call."""
    calls = []
    kernels = TileKernels(
        reduce=lambda *_, **__: calls.append("reduce"), gradient=lambda *_, **__: calls.append("gradient")
    )
    with (
        mock.patch.object(tiled_scores, "kernels_for", return_value=kernels),
        mock.patch.object(input_checks, "agree"),
        FakeTensorMode(),
    ):
        yield calls


@pytest.fixture
def fake_gpu():
    with fake_kernels() as calls:
        yield calls


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.empty(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.nn.Parameter(torch.empty(VOCAB, HIDDEN, device="cuda", dtype=torch.bfloat16))
    weight.main_grad = torch.empty(VOCAB, HIDDEN, device="cuda")  # type: ignore[attr-defined]
    return hidden, weight, torch.empty(TOKENS, device="cuda", dtype=torch.int64)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_forward_holds_one_tile_and_never_waits(fake_gpu, temperature):
    hidden, weight, targets = inputs()
    with Watch() as watch:
        scores = vocab_parallel.linear_token_scores(
            hidden, weight, targets, temperature=temperature, chunk_tokens=CHUNK
        )
    assert scores.logprobs.shape == (TOKENS,)
    assert watch.waits == []
    num_tiles = TOKENS // CHUNK * -(-VOCAB // (GPU_TILE_ELEMENTS // CHUNK))
    assert fake_gpu == ["reduce"] * num_tiles
    assert TILE <= watch.peak < TILE + (8 << 20), watch.peak / TILE


def test_backward_holds_two_tiles_and_never_waits(fake_gpu):
    """Beside the result: a tile of logits, its gradient in bfloat16, and hidden's gradient of a chunk in float32."""
    hidden, weight, targets = inputs()
    scores = vocab_parallel.linear_token_scores(hidden, weight, targets, chunk_tokens=CHUNK)
    with Watch() as watch:  # not by autograd's engine, whose threads look for the GPU
        scores.logprobs.grad_fn.apply(torch.empty(TOKENS, device="cuda"), None)  # type: ignore[union-attr]
    assert watch.waits == []
    assert set(fake_gpu) == {"reduce", "gradient"}
    results = 2 * TOKENS * HIDDEN + 2 * VOCAB * HIDDEN  # hidden's, and the zeros that autograd gets for the weight
    temporaries = TILE + TILE // 2 + 4 * CHUNK * HIDDEN
    assert watch.peak < results + 2 * temporaries, (watch.peak - results) / temporaries
