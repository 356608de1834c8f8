"""Scores of one rank against dense float64: values, gradients, precision, memory, Megatron's gradient buffers."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gtpo_megatron.distributed import tiled_scores, vocab_parallel
from gtpo_megatron.distributed.vocab_parallel import linear_token_scores, token_scores
from gtpo_megatron.errors import ConfigError, DataError, GTPOError, ShapeError
from gtpo_megatron.kernels import partials, tiles, torch_tiles
from gtpo_megatron.kernels.cpu_products import BackwardPasses, has_amx
from tests.reference.vocab_scores import dense_scores


def _problem(tokens=11, hidden=5, vocab=23, true=None, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64).to(dtype)
    w = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64).to(dtype)
    return h, w, torch.randint(0, true or vocab, (tokens,), generator=generator)


@pytest.fixture
def narrow_tiles(monkeypatch):
    """Many tiles of few columns, and few rows a block, so that small problems exercise the merging."""
    monkeypatch.setattr(tiles, "MIN_TILE_COLUMNS", 4)
    monkeypatch.setattr(tiles, "CPU_TILE_ELEMENTS", 1)
    monkeypatch.setattr(torch_tiles, "BLOCK_ELEMENTS", 8)


@pytest.mark.usefixtures("narrow_tiles")
@settings(max_examples=30)
@given(
    tokens=st.integers(1, 9),
    vocab=st.integers(1, 19),
    padding=st.integers(0, 9),
    chunk=st.integers(1, 10),
    temperature=st.sampled_from([1.0, 0.6, "per token"]),
    entropy_grad=st.booleans(),
    kept_bytes=st.sampled_from([0, vocab_parallel.KEPT_BYTES]),
)
def test_fused_and_plain_equal_dense(tokens, vocab, padding, chunk, temperature, entropy_grad, kept_bytes):
    h, w, targets = _problem(tokens, 3, vocab + padding, vocab, seed=vocab)
    if temperature == "per token":
        temperature = torch.linspace(0.4, 2.0, tokens)
    upstream = torch.linspace(-1, 2, tokens, dtype=torch.float64)
    h_leaf, w_leaf = h.clone().requires_grad_(), w.clone().requires_grad_()
    logits = h_leaf @ w_leaf.T
    logits.retain_grad()
    want = dense_scores(logits, targets, temperature, vocab)
    (want.logprobs @ upstream + (want.entropy @ upstream.flip(0) if entropy_grad else 0.0)).backward()

    h_mine, w_mine = h.clone().requires_grad_(), w.clone().requires_grad_()
    z_mine = (h @ w.T).requires_grad_()
    options = (targets, None, temperature, vocab, entropy_grad)
    with mock.patch.object(vocab_parallel, "KEPT_BYTES", kept_bytes):
        fused = linear_token_scores(h_mine, w_mine, *options, chunk)
    plain = token_scores(z_mine, *options)
    for scores in (fused, plain):
        torch.testing.assert_close(scores.logprobs, want.logprobs)
        torch.testing.assert_close(scores.entropy, want.entropy)
        assert scores.entropy.requires_grad == entropy_grad
        (scores.logprobs @ upstream + (scores.entropy @ upstream.flip(0) if entropy_grad else 0.0)).backward()
    torch.testing.assert_close(h_mine.grad, h_leaf.grad)
    torch.testing.assert_close(w_mine.grad, w_leaf.grad)
    torch.testing.assert_close(z_mine.grad, logits.grad)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradcheck(temperature):
    h, w, targets = _problem(4, 3, 7, 6)

    def fused(hidden, weight):
        scores = linear_token_scores(hidden, weight, targets, None, temperature, 6, True, 3)
        return scores.logprobs, scores.entropy

    def plain(logits):
        scores = token_scores(logits, targets, None, temperature, 6, True)
        return scores.logprobs, scores.entropy

    assert torch.autograd.gradcheck(fused, (h.requires_grad_(), w.requires_grad_()))
    assert torch.autograd.gradcheck(plain, ((h @ w.T).detach().requires_grad_(),))


def test_no_tokens():
    h, w = torch.zeros(0, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    for temperature in (1.0, torch.zeros(0)):
        scores = linear_token_scores(h, w, none, None, temperature)
        assert scores.logprobs.shape == scores.entropy.shape == (0,)
    (scores.logprobs.sum() * 0.0).backward()
    assert h.grad.shape == (0, 3)
    assert torch.equal(w.grad, torch.zeros(5, 3))
    logits = torch.zeros(0, 5, requires_grad=True)
    token_scores(logits, none).logprobs.sum().backward()
    assert logits.grad.shape == (0, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_logits(dtype):
    one_hot = torch.full((9,), -3e4)
    one_hot[4] = 3e4
    logits = torch.stack([torch.full((9,), 3e4), torch.full((9,), -3e4), torch.zeros(9), one_hot, one_hot]).to(dtype)
    logits.requires_grad_()
    targets = torch.tensor([0, 8, 3, 4, 5])
    scores = token_scores(logits, targets, entropy_grad=True)
    log_nine = torch.tensor(9.0, dtype=dtype).log()
    torch.testing.assert_close(scores.entropy, torch.stack([log_nine] * 3 + [log_nine * 0] * 2))
    torch.testing.assert_close(
        scores.logprobs, torch.stack([-log_nine] * 3 + [log_nine * 0, log_nine.new_tensor(-6e4)])
    )
    (scores.logprobs.sum() + scores.entropy.sum()).backward()
    assert logits.grad.isfinite().all()
    torch.testing.assert_close(logits.grad.sum(1), logits.new_zeros(5), atol=1e-6, rtol=0)


def test_excluded_columns_are_as_if_absent():
    logits = torch.randn(3, 8)
    logits[:, [1, 6]] = -torch.inf
    kept = [0, 2, 3, 4, 5, 7]
    scores = token_scores(logits, torch.tensor([0, 7, 2]), entropy_grad=True)
    want = dense_scores(logits[:, kept], torch.tensor([0, 5, 1]))
    torch.testing.assert_close(scores.entropy.double(), want.entropy)
    torch.testing.assert_close(scores.logprobs.double(), want.logprobs)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_poisoned_logit_is_not_hidden(poison):
    logits = torch.randn(3, 8)
    logits[1, 5] = poison
    scores = token_scores(logits, torch.tensor([0, 1, 2]))
    assert scores.entropy.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_input_is_left_alone(dtype, temperature):
    logits = torch.randn(6, 40).to(dtype).requires_grad_()
    before, version = logits.detach().clone(), logits._version
    scores = token_scores(logits, torch.arange(6), None, temperature, entropy_grad=True)
    (scores.logprobs.sum() + scores.entropy.sum()).backward()
    assert torch.equal(logits, before)
    assert logits._version == version
    assert logits.grad.dtype == dtype
    assert scores.logprobs.dtype == scores.entropy.dtype == torch.float32
    want = dense_scores(before, torch.arange(6), temperature)
    torch.testing.assert_close(scores.entropy.double(), want.entropy, rtol=1e-5, atol=1e-6)


def test_bfloat16_weights_keep_float32_logits():
    h, w, targets = _problem(16, 64, 3000, dtype=torch.bfloat16)
    h_leaf, w_leaf = h.double().requires_grad_(), w.double().requires_grad_()
    want = dense_scores(h_leaf @ w_leaf.T, targets)
    want.logprobs.sum().backward()
    h.requires_grad_()
    w.requires_grad_()
    scores = linear_token_scores(h, w, targets, chunk_tokens=5)
    scores.logprobs.sum().backward()
    # Logits rounded to bfloat16 would be off by up to 0.1 here.
    torch.testing.assert_close(scores.logprobs.double(), want.logprobs, atol=2e-5, rtol=1e-6)
    torch.testing.assert_close(scores.entropy.double(), want.entropy, atol=2e-5, rtol=1e-5)
    for mine, wide in ((h.grad, h_leaf.grad), (w.grad, w_leaf.grad)):
        if has_amx():  # a tile's gradient is rounded for its products, as on a GPU
            assert (mine.double() - wide).norm() < 5e-3 * wide.norm()
        else:
            torch.testing.assert_close(mine, wide.to(torch.bfloat16), rtol=1e-2, atol=1e-3)


def test_logits_that_backward_makes_again_are_those_of_the_forward_pass(monkeypatch):
    """Rounded where its other products are, a confident token's probabilities would not add up to 1."""
    h, w, targets = _problem(12, 576, 700, dtype=torch.float32)
    w[targets] = 2 * h  # tokens of which the model is sure
    found = []
    for is_rounded in (False, True):
        monkeypatch.setattr(vocab_parallel, "KEPT_BYTES", 0)
        monkeypatch.setattr(BackwardPasses, "are_rounded", is_rounded)
        leaf = h.clone().requires_grad_()
        passes = BackwardPasses()
        loss = linear_token_scores(leaf, w, targets, chunk_tokens=5).logprobs.sum()
        passes.begin_with(loss)
        loss.backward()
        passes.end()
        found.append(leaf.grad)
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=1e-6)


def test_autocast_does_not_round_the_logits():
    h, w, targets = _problem(8, 32, 500, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = linear_token_scores(h, w, targets)
    torch.testing.assert_close(scores.logprobs, linear_token_scores(h, w, targets).logprobs, rtol=0, atol=0)


@pytest.mark.parametrize("std", [2.0, 4.0, 8.0, "peaked"])
def test_accuracy_at_a_real_vocabulary(std):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(24, 152_064, generator=generator)
    if std == "peaked":
        # The tail holds about exp(0.5) V: heads from 8 to 30 give entropies from 12 nats down to 1e-7.
        logits[:, 77] = torch.linspace(8, 30, 24)
    else:
        logits *= std
    targets = torch.randint(0, 152_064, (24,), generator=generator)
    targets[::2] = logits[::2].argmax(1)
    want = dense_scores(logits, targets)
    got = token_scores(logits, targets)
    assert (got.entropy >= 0).all()
    assert (got.entropy - want.entropy).abs().max() < 2e-4
    visible = want.entropy >= 1e-5
    assert visible.sum() >= 12
    assert ((got.entropy / want.entropy - 1)[visible]).abs().max() < 1e-3
    assert (got.logprobs - want.logprobs).abs().max() < 2e-4
    if std == "peaked":
        assert want.entropy.min() < 1e-5  # the hard end is in the test


def test_fused_accuracy_of_peaked_tokens():
    """One hidden unit of value 1 makes any logits exactly."""
    generator = torch.Generator().manual_seed(2)
    for head in (14.0, 22.0, 29.0):
        weight = torch.randn(152_064, 1, generator=generator)
        weight[100_001] = head
        want = dense_scores(weight.T, torch.tensor([100_001]))
        got = linear_token_scores(torch.ones(1, 1), weight, torch.tensor([100_001]))
        torch.testing.assert_close(got.entropy.double(), want.entropy, rtol=1e-5, atol=0)
        torch.testing.assert_close(got.logprobs.double(), want.logprobs, rtol=1e-5, atol=0)


@pytest.mark.parametrize("offset", [-80.0, -55.0, 0.0, 55.0, 80.0])
def test_fused_accuracy_wherever_the_logits_lie(offset):
    """Inside the limit sums are of exp(z), outside of exp(z - m): both must keep their digits, peaked rows too."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(16, 40_000, generator=generator) * 2
    logits[:8, 20_011] = torch.linspace(8, 32, 8)  # entropies from 9 nats to 1e-8
    logits += offset
    targets = torch.full((16,), 20_011)
    want = dense_scores(logits, targets)
    got = linear_token_scores(torch.eye(16), logits.T.contiguous(), targets)  # a one a row: the logits exactly
    assert (got.entropy.double() - want.entropy).abs().max() < 2e-5
    visible = want.entropy >= 1e-5
    assert 8 < visible.sum() < 16
    torch.testing.assert_close(got.entropy.double()[visible], want.entropy[visible], rtol=1e-4, atol=0)
    assert (got.logprobs.double() - want.logprobs).abs().max() < 1e-5


def test_sums_of_unshifted_logits_equal_shifted_ones():
    """The two forms of one tile's partials, side by side."""
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(4)) * 3
    targets = torch.zeros(5, dtype=torch.int64)
    shifted, unshifted = (partials.empty_table(1, 5, like=logits)[0] for _ in range(2))
    torch_tiles.reduce_tile(logits, targets, None, shifted, owned=False, may_mask=True)
    torch_tiles.reduce_tile(logits, targets, None, unshifted, owned=False, may_mask=False)
    torch.testing.assert_close(unshifted, shifted, rtol=2e-6, atol=0)
    for bad in (61.0, -61.0, torch.nan):
        assert not torch_tiles._reduce_unshifted(torch.full((2, 3), bad), torch.empty(4, 2))


def test_gradient_of_a_nearly_certain_token_keeps_its_digits():
    logits = torch.zeros(1, 50)
    logits[0, 3] = 20.0
    leaf, wide = logits.clone().requires_grad_(), logits.double().requires_grad_()
    token_scores(leaf, torch.tensor([3])).logprobs.sum().backward()
    dense_scores(wide, torch.tensor([3])).logprobs.sum().backward()
    assert wide.grad[0, 3] < 2e-7  # one float32 step of a probability near 1 is 6e-8
    torch.testing.assert_close(leaf.grad.double(), wide.grad, rtol=1e-5, atol=0)


def test_tied_embedding_gets_both_gradients():
    table = torch.randn(13, 4, dtype=torch.float64)
    ids, targets = torch.tensor([1, 4, 4, 12]), torch.tensor([4, 4, 12, 0])
    tied, dense = table.clone().requires_grad_(), table.clone().requires_grad_()
    linear_token_scores(tied[ids].tanh(), tied, targets, None, 1.0, 13).logprobs.sum().backward()
    dense_scores(dense[ids].tanh() @ dense.T, targets).logprobs.sum().backward()
    torch.testing.assert_close(tied.grad, dense.grad)


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_main_grad_collects_in_float32_and_keeps_a_tied_embedding(main_dtype, tied):
    """Megatron's hook adds ``weight.grad`` into ``main_grad`` after each micro-batch, then drops it."""
    h, w, targets = _problem(9, 6, 21, dtype=torch.bfloat16)
    weight = torch.nn.Parameter(w)
    weight.main_grad = torch.zeros(21, 6, dtype=main_dtype)
    weight.grad_added_to_main_grad = False
    wide = w.double().requires_grad_()
    ids = targets.flip(0)
    for _ in range(2):
        hidden, wide_hidden = (weight[ids], wide[ids]) if tied else (h, h.double())
        linear_token_scores(hidden, weight, targets, chunk_tokens=4).logprobs.sum().backward()
        dense_scores(wide_hidden @ wide.T, targets).logprobs.sum().backward()
        assert weight.grad is not None, "Megatron's hook waits for a gradient"
        assert not weight.grad_added_to_main_grad, "or the embedding's share would be skipped"
        weight.main_grad.add_(weight.grad)
        weight.grad = None
    # A tied share arrives as the embedding's own bfloat16 gradient.
    precise = main_dtype == torch.float32 and not tied
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if precise else {"rtol": 2e-2, "atol": 3e-2}
    torch.testing.assert_close(weight.main_grad.double(), wide.grad, **tolerance)


def test_frozen_inputs_get_no_gradient():
    h, w, targets = _problem()
    h.requires_grad_()
    linear_token_scores(h, w, targets).logprobs.sum().backward()
    assert w.grad is None
    h_grad, h.grad = h.grad, None
    h, w = h.detach(), w.requires_grad_()
    linear_token_scores(h, w, targets).logprobs.sum().backward()
    assert h.grad is None
    assert h_grad.abs().max() > 0 < w.grad.abs().max()


class _LargestTensor(TorchDispatchMode):
    """Bytes of the largest storage that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


def test_logits_are_never_whole(monkeypatch):
    monkeypatch.setattr(tiles, "CPU_TILE_ELEMENTS", 1 << 15)
    monkeypatch.setattr(vocab_parallel, "KEPT_BYTES", 256 * 4096 * 4 - 1)
    h, w, targets = _problem(256, 8, 4096, 4000, dtype=torch.float32)
    h.requires_grad_()
    w.requires_grad_()
    with _LargestTensor() as mode:
        linear_token_scores(h, w, targets, None, 0.9, 4000, True, 64).logprobs.sum().backward()
    gradient_bytes = 4096 * 8 * 4
    tile_bytes = (1 << 15) * 4
    assert mode.largest == max(gradient_bytes, tile_bytes)
    assert mode.largest < 64 * 4096 * 4 / 4  # a quarter of one chunk of logits; the whole would be 32 times more


@pytest.mark.usefixtures("narrow_tiles")
def test_kept_logits_give_the_gradients_of_those_made_again(monkeypatch):
    """To the last bit, in a second backward pass too, for which nothing is left of them."""
    h, w, targets = _problem(9, 5, 24, 21, dtype=torch.float32)
    h.requires_grad_()
    w.requires_grad_()

    def gradients():
        """Of two backward passes, and the products of logits that each made."""
        scores = linear_token_scores(h, w, targets, None, 0.9, 21, True, 4)
        loss = scores.logprobs.sum() + scores.entropy.sum()
        found, products = [], []
        for _ in range(2):
            with mock.patch.object(tiled_scores, "_matmul", wraps=tiled_scores._matmul) as matmul:
                found += torch.autograd.grad(loss, (h, w), retain_graph=True)
            products.append(matmul.call_count)
        return found, products

    kept, (first, second) = gradients()
    assert first == 0 < second
    monkeypatch.setattr(vocab_parallel, "KEPT_BYTES", 0)
    made_again, products = gradients()
    assert products == [second, second]
    for one, again in zip(kept, made_again, strict=True):
        assert torch.equal(one, again)


H, W, IDS = torch.randn(3, 4), torch.randn(6, 4), torch.tensor([0, 1, 5])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: linear_token_scores(H, W, torch.tensor([0, 1, 6])), DataError, r"got 6, expected ids in \[0, 6\)"),
        (lambda: linear_token_scores(H, W, torch.tensor([0, -1, 5])), DataError, "got -1"),
        (lambda: linear_token_scores(H, W, IDS, None, 1.0, 5), DataError, "got 5"),
        (lambda: linear_token_scores(H, W, IDS[:2]), ShapeError, "target_ids"),
        (lambda: linear_token_scores(H, W, IDS.float()), ShapeError, "target_ids"),
        (lambda: linear_token_scores(H, W[:, :3], IDS), ShapeError, r"\[V/tp, H\]"),
        (lambda: linear_token_scores(H[None], W, IDS), ShapeError, r"\[P, H\]"),
        (lambda: linear_token_scores(H, W.half(), IDS), ShapeError, "float16"),
        (lambda: linear_token_scores(H.half(), W.half(), IDS), ShapeError, "float16"),
        (lambda: linear_token_scores(H, W.long(), IDS), ShapeError, "int64"),
        (lambda: linear_token_scores(H.bfloat16(), W, IDS), ShapeError, "bfloat16"),
        (lambda: linear_token_scores(H, W, IDS, None, 1.0, 7), ShapeError, "vocab_size: got 7"),
        (lambda: linear_token_scores(H, W, IDS, None, 1.0, 0), ShapeError, "vocab_size: got 0"),
        (lambda: linear_token_scores(H, W, IDS, chunk_tokens=0), ConfigError, "chunk_tokens"),
        (lambda: linear_token_scores(H, W, IDS, None, 0.0), DataError, "temperature: got 0.0"),
        (lambda: linear_token_scores(H, W, IDS, None, float("nan")), DataError, "temperature"),
        (lambda: linear_token_scores(H, W, IDS, None, torch.tensor([1.0, -1.0, 1.0])), DataError, "from -1.0 to 1.0"),
        (lambda: linear_token_scores(H, W, IDS, None, torch.tensor([1.0, torch.nan, 1.0])), DataError, "nan"),
        (lambda: linear_token_scores(H, W, IDS, None, torch.ones(2)), ShapeError, "temperature"),
        (lambda: token_scores(H, torch.tensor([0, 1, 4])), DataError, "got 4"),
        (lambda: token_scores(H.long(), torch.tensor([0, 1, 3])), ShapeError, "int64"),
        (lambda: token_scores(H[0], torch.tensor([0])), ShapeError, r"\[P, V/tp\]"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert isinstance(caught.value, GTPOError)


def test_public_names_are_pinned():
    assert vocab_parallel.__all__ == ["TokenScores", "linear_token_scores", "token_scores"]
