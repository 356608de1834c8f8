"""What is computed a tile of tokens at a time is what the formula says, gradients included."""

import pytest
import torch

from gtpo_megatron.actor import cpu_tiles

ROWS = [(0, 1), (1, 1), (7, 1), (5, 3)]
"""Of tokens and what is between them and the last dimension; a tile below has two or three rows."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(cpu_tiles, "TILE_ELEMENTS", 24 // torch.get_num_threads())


def gradients(outputs, inputs, upstream):
    return torch.autograd.grad(outputs, inputs, upstream)


def exact_norm(hidden, weight, eps):
    """From the formula, in float64."""
    return weight * hidden / (hidden.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_norm(rows, dtype, limit):
    hidden, weight = torch.randn(*rows, 8).to(dtype).requires_grad_(), torch.rand(8).to(dtype).requires_grad_()
    upstream = torch.randn(*rows, 8).to(dtype)
    found = cpu_tiles.rms_norm(hidden, weight, 1e-3)
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = exact_norm(*wide, 1e-3)
    assert found.dtype == dtype
    pairs = zip(
        (found, *gradients(found, (hidden, weight), upstream)),
        (expected, *gradients(expected, wide, upstream.double())),
        strict=True,
    )
    for ours, exact in pairs:
        torch.testing.assert_close(ours.double(), exact, rtol=limit, atol=4 * limit)


def test_norm_of_a_slice_and_of_a_wider_weight():
    """Heads are slices of one product; a factor of ``1 + w`` is float32."""
    whole = torch.randn(6, 5, 16)
    hidden, weight = whole[..., 3:11].bfloat16(), torch.rand(8)
    found = cpu_tiles.rms_norm(whole[..., 3:11], weight, 1e-6)
    torch.testing.assert_close(found, exact_norm(whole[..., 3:11].double(), weight.double(), 1e-6).float())
    assert found.is_contiguous()
    narrow = cpu_tiles.rms_norm(hidden, 1 + weight, 1e-6)
    torch.testing.assert_close(
        narrow.double(), exact_norm(hidden.double(), 1 + weight.double(), 1e-6), rtol=8e-3, atol=8e-3
    )


def test_norm_of_frozen_weights_has_the_gradient_of_its_input():
    hidden, weight, upstream = torch.randn(3, 8, requires_grad=True), torch.rand(8), torch.randn(3, 8)
    found = gradients(cpu_tiles.rms_norm(hidden, weight, 1e-6), hidden, upstream)[0]
    wide = hidden.detach().double().requires_grad_()
    exact = gradients(exact_norm(wide, weight.double(), 1e-6), wide, upstream.double())[0]
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=4e-6)


def turned(heads, angles, factor):
    """From the formula: each pair of elements of the two halves is a complex number."""
    half = angles.shape[-1] // 2
    pairs = torch.complex(heads[..., :half].double(), heads[..., half : 2 * half].double())
    pairs = pairs * torch.polar(torch.full_like(angles[..., :half], factor), angles[..., :half])
    return torch.cat([pairs.real, pairs.imag, heads[..., 2 * half :].double()], dim=-1)


def refuse(t, freqs, mscale=1.0):
    raise AssertionError("it is for other pairs")


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("rotary_size", [4, 8])
def test_rotation(rows, dtype, limit, rotary_size):
    heads = torch.randn(rows, 1, 5, 8).to(dtype)[:, :, :3].requires_grad_()  # a slice, as of one product of all heads
    angles = torch.randn(rows, 1, 1, rotary_size // 2).repeat(1, 1, 1, 2).double()
    upstream = torch.randn(rows, 1, 3, 8).to(dtype)
    found = cpu_tiles.rotating(refuse)(heads, angles.float(), mscale=1.25)
    wide = heads.detach().double().requires_grad_()
    expected = turned(wide, angles, 1.25)
    assert found.dtype == dtype
    for ours, exact in (
        (found, expected),
        (gradients(found, heads, upstream)[0], gradients(expected, wide, upstream.double())[0]),
    ):
        torch.testing.assert_close(ours.double(), exact, rtol=limit, atol=4 * limit)


def megatron_0_16(t, freqs, rotary_interleaved=False, multi_latent_attention=False, mscale=1.0):
    return "as before"


def megatron_0_19(
    t, freqs, rotary_interleaved=False, mla_rotary_interleaved=False, mscale=1.0, multi_latent_attention=None
):
    return "as before"


@pytest.mark.parametrize(
    ("function", "switches"),
    [
        (megatron_0_16, {"rotary_interleaved": True}),
        (megatron_0_16, {"multi_latent_attention": True}),
        (megatron_0_19, {"rotary_interleaved": True, "mla_rotary_interleaved": False}),
        (megatron_0_19, {"mla_rotary_interleaved": True}),
        (megatron_0_19, {"multi_latent_attention": True}),
    ],
)
def test_other_pairs_are_rotated_as_before(function, switches):
    heads, angles = torch.randn(2, 1, 1, 4), torch.zeros(2, 1, 1, 4)
    rotate = cpu_tiles.rotating(function)
    assert rotate(heads, angles, **switches) == "as before"
    off = dict.fromkeys(switches, False)
    assert torch.equal(rotate(heads, angles, **off, mscale=2.0), 2 * heads)


def test_angles_that_are_not_one_a_token_are_broadcast_as_before():
    rotate = cpu_tiles.rotating(megatron_0_16)
    assert rotate(torch.randn(3, 1, 1, 4), torch.zeros(1, 1, 1, 4)) == "as before"


@pytest.mark.megatron
@pytest.mark.usefixtures("megatron")
@pytest.mark.filterwarnings("ignore")
def test_megatron_s_rotation_is_ours():
    from megatron.core.models.common.embeddings import rope_utils

    heads, angles = torch.randn(5, 1, 2, 8), torch.randn(5, 1, 1, 4).repeat(1, 1, 1, 2)
    found = rope_utils._apply_rotary_pos_emb_bshd(heads, angles)
    torch.testing.assert_close(found.double(), turned(heads, angles.double(), 1.0), rtol=1e-6, atol=1e-6)
    assert found.grad_fn is None
    found = rope_utils._apply_rotary_pos_emb_bshd(heads.requires_grad_(), angles)
    assert type(found.grad_fn).__name__ == "_RotationBackward"
