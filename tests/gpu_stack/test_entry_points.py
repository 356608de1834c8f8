"""Each answer of ``tests.te_on_cpu`` against plain torch, or a scalar loop; in bfloat16, as the actor has it."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tests.te_on_cpu import attention, context_parallel, extension, matmul_and_norm, optimizer

BF16 = 2**-8
WORKSPACE = torch.empty(1)
OVERLAP = {"comm_overlap": None, "comm_type": None, "extra_output": None, "bulk_overlap": False, "alpha": 1.0}
BOUNDS = [0, 8, 12, 28]
"""Three packed sequences, each of which two ranks can share."""
CU_SEQLENS = torch.tensor(BOUNDS, dtype=torch.int32)
THD = SimpleNamespace(name="NVTE_THD")


def drawn(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gemm(a, ta, b, tb, *, out=None, out_dtype=None, bias=None, is_backward=False, accumulates=False):
    return matmul_and_norm.generic_gemm(
        a, ta, b, tb, out, None, out_dtype, bias, 4, False, None, is_backward, WORKSPACE, 1, accumulates, False,
        **OVERLAP, beta=float(accumulates),
    )  # fmt: skip


def test_products_are_those_of_a_linear_layer_and_its_backward():
    x, weight, bias, grad = drawn(3, 5, 16), drawn(24, 16, seed=1), drawn(24, seed=2), drawn(3, 5, 24, seed=3)
    exact = [t.float().requires_grad_() for t in (x, weight, bias)]
    wanted = F.linear(*exact)
    wanted.backward(grad.float())
    out, *_ = gemm(weight, True, x, False, bias=bias)
    torch.testing.assert_close(out, wanted.bfloat16(), rtol=BF16, atol=0)
    grad_x, *_ = gemm(weight, False, grad, False)
    torch.testing.assert_close(grad_x, exact[0].grad.bfloat16(), rtol=BF16, atol=1e-6)
    # weights' gradient, added to the main one in float32; the bias' beside it
    main = torch.ones(24, 16)
    found, grad_bias, *_ = gemm(x, False, grad, True, out=main, bias=bias, is_backward=True, accumulates=True)
    assert found is main
    torch.testing.assert_close(main, 1 + exact[1].grad)
    torch.testing.assert_close(grad_bias, exact[2].grad.bfloat16(), rtol=BF16, atol=1e-6)
    found, *_ = gemm(x, False, grad, True, out=main)
    torch.testing.assert_close(found, exact[1].grad)
    found, *_ = gemm(x, False, grad, True, out_dtype=2)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("centred", [False, True])
def test_rmsnorm(centred):
    x, weight, grad = drawn(7, 32), drawn(32, seed=1), drawn(7, 32, seed=2)
    exact, scale = x.float().requires_grad_(), weight.float().requires_grad_()
    wanted = F.rms_norm(exact, (32,), scale + float(centred), 1e-6)
    wanted.backward(grad.float())
    out, _, inverse_root = matmul_and_norm.rmsnorm_fwd(x, weight, 1e-6, None, None, 4, 0, centred)
    torch.testing.assert_close(out, wanted.bfloat16(), rtol=BF16, atol=1e-6)
    grad_x, grad_weight = matmul_and_norm.rmsnorm_bwd(grad, x, inverse_root, weight, 0, centred)
    torch.testing.assert_close(grad_x, exact.grad.bfloat16(), rtol=BF16, atol=1e-5)
    torch.testing.assert_close(grad_weight, scale.grad.bfloat16(), rtol=BF16, atol=1e-5)


def rotated(x, frequencies, positions):
    """Every pair ``(x_i, x_{i + d/2})`` is turned by its angle, as a complex number."""
    size = frequencies.shape[-1] // 2
    out = x.float().clone()
    for token, position in enumerate(positions):
        for i in range(size):
            angle = frequencies[position, 0, 0, i]
            turned = torch.complex(out[token, :, i], out[token, :, i + size]) * torch.polar(torch.ones([]), angle)
            out[token, :, i], out[token, :, i + size] = turned.real, turned.imag
    return out.to(x.dtype)


def test_rotary_embeddings_by_position_in_the_sequence_and_back():
    angles = torch.arange(16.0)[:, None] * 0.3 ** torch.arange(3)
    frequencies = torch.cat([angles, angles], dim=-1)[:, None, None]
    x = drawn(28, 2, 8)  # the last two elements are not turned
    positions = [position for start, end in itertools.pairwise(BOUNDS) for position in range(end - start)]
    options = (frequencies, None, THD, False, CU_SEQLENS)
    whole = matmul_and_norm.fused_rope_forward(x, *options, 1, 0)
    torch.testing.assert_close(whole, rotated(x, frequencies, positions), rtol=2 * BF16, atol=BF16)
    back = matmul_and_norm.fused_rope_backward(whole, *options, 1, 0)
    torch.testing.assert_close(back, x, rtol=4 * BF16, atol=4 * BF16)
    for rank in range(2):
        held = torch.cat([shard(rank, start, end) for start, end in itertools.pairwise(BOUNDS)])
        part = matmul_and_norm.fused_rope_forward(x[held], *options, 2, rank)
        assert torch.equal(part, whole[held])


def shard(rank, start, end):
    """The two of four chunks that a rank holds: an early one and a late one."""
    chunks = torch.arange(start, end).chunk(4)
    return torch.cat([chunks[rank], chunks[3 - rank]])


MASKS = {"padding_causal": "NVTE_PADDING_CAUSAL_MASK", "padding": "NVTE_PADDING_MASK"}
NAMES = [
    SimpleNamespace(name=name) for name in ("NVTE_THD_THD_THD", "NVTE_THD", "NVTE_NO_BIAS", "NVTE_VANILLA_SOFTMAX")
]


def forward(q, k, v, lengths, places, mask, scale=0.25):
    layout, out_format, bias, softmax = NAMES
    return attention.fused_attn_fwd(
        16, 16, True, scale, 0.0, True, layout, out_format, None, bias, mask, softmax, (-1, -1), False,
        *lengths, q, k, v, torch.bfloat16, *places, None, None, None, None, None, None, None, 16, False, False,
    )  # fmt: skip


def backward(q, k, v, out, grad, sums, lengths, places, mask, scale=0.25):
    layout, out_format, bias, softmax = NAMES
    return attention.fused_attn_bwd(
        16, 16, scale, 0.0, True, layout, out_format, out_format, layout, None, None, bias, mask, softmax, (-1, -1),
        False, False, *lengths, q, k, v, out, grad, torch.bfloat16, [sums, torch.zeros(2)], *places,
        None, None, None, False,
    )  # fmt: skip


def attended(q, k, v, queries, keys, *, is_causal, scale=0.25):
    """By torch, sequence by sequence: ``[t, heads, d]``."""
    outputs = torch.zeros_like(q)
    for own, theirs in zip(queries, keys, strict=True):
        parts = (x[sequence].transpose(0, 1)[None] for x, sequence in ((q, own), (k, theirs), (v, theirs)))
        found = F.scaled_dot_product_attention(*parts, is_causal=is_causal, scale=scale, enable_gqa=True)
        outputs = outputs.index_put((torch.arange(len(q))[own],), found[0].transpose(0, 1))
    return outputs


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("padded", [False, True])
def test_attention_within_sequences_forward_and_backward(mask, padded):
    """Grouped queries; with room between sequences, whose tokens take no part."""
    bounds = [0, 10, 14, 32] if padded else BOUNDS
    places = [torch.tensor(bounds, dtype=torch.int32)] * 2
    q, k, v = drawn(bounds[-1], 4, 16), drawn(bounds[-1], 2, 16, seed=1), drawn(bounds[-1], 2, 16, seed=2)
    slices = [slice(start, start + length) for start, length in zip(bounds, (8, 4, 16), strict=False)]
    kind = SimpleNamespace(name=MASKS[mask])
    out, sums, _ = forward(q, k, v, [CU_SEQLENS] * 2, places, kind)
    exact = [x.float().requires_grad_() for x in (q, k, v)]
    wanted = attended(*exact, slices, slices, is_causal=mask == "padding_causal")
    torch.testing.assert_close(out, wanted.bfloat16(), rtol=BF16, atol=1e-6)
    scores = 0.25 * q[slices[1]].float()[0, 3] @ k[slices[1]].float()[:, 1].t()
    seen = scores[:1] if mask == "padding_causal" else scores
    assert sums[slices[1]][0, 3, 0] == pytest.approx(float(seen.logsumexp(0)))
    grad = drawn(*q.shape, seed=3)
    wanted.backward(grad.float())
    # from the exact result, as its rounding is the kernels' own
    found = backward(q, k, v, wanted.detach(), grad, sums, [CU_SEQLENS] * 2, places, kind)
    for tensor, leaf in zip(found[:3], exact, strict=True):
        torch.testing.assert_close(tensor, leaf.grad.bfloat16(), rtol=2 * BF16, atol=1e-5)
    assert found[3:] == [None, None]


def halves(first, second):
    """Places of the halves in every sequence."""
    found = []
    for start, end in itertools.pairwise(BOUNDS):
        middle = (start + end) // 2
        found += [*(range(start, middle) if first else ()), *(range(middle, end) if second else ())]
    return found


def test_halves_of_sequences_are_read():
    x, sums = drawn(28, 2, 4), drawn(3, 28, dtype=torch.float32)
    for index in (0, 1):
        part = context_parallel.thd_read_half_tensor(x, CU_SEQLENS, index)
        assert torch.equal(part, x[halves(index == 0, index == 1)])
    both = torch.stack([x, 2 * x])
    assert torch.equal(context_parallel.thd_read_half_tensor(both, CU_SEQLENS, 1), both[:, halves(False, True)])
    found = context_parallel.thd_read_second_half_lse(sums, CU_SEQLENS, True, 16)
    assert torch.equal(found[:, :14], sums[:, halves(False, True)])
    assert not found[:, 14:].any()


@pytest.mark.parametrize("only_second", [False, True])
def test_two_parts_of_the_keys_make_the_whole(only_second):
    """Results over two sets of keys, joined by their sums, are that over all keys."""
    places = halves(not only_second, True)
    q, scores = drawn(28, 2, 4, dtype=torch.float32), drawn(2, 28, 6, seed=4, dtype=torch.float32)
    values = drawn(6, 2, 4, seed=5, dtype=torch.float32)
    over = lambda keys: torch.einsum("htk,khd->thd", scores[..., keys].softmax(-1), values[keys])  # noqa: E731
    sums_over = lambda keys: scores[..., keys].logsumexp(-1)  # noqa: E731
    out, old = over(slice(0, 4)), sums_over(slice(0, 4))
    step, step_sums = over(slice(4, 6))[places], sums_over(slice(4, 6))[:, places]
    sums = old.clone()
    if only_second:
        context_parallel.thd_second_half_lse_correction(sums, step_sums, CU_SEQLENS, True)
    else:
        sums = torch.logaddexp(old, step_sums)
    torch.testing.assert_close(sums[:, places], sums_over(slice(0, 6))[:, places])
    context_parallel.thd_out_correction(out, step, old, sums, step_sums, CU_SEQLENS, only_second, True)
    torch.testing.assert_close(out[places], over(slice(0, 6))[places])
    rest = [token for token in range(28) if token not in places]
    torch.testing.assert_close(out[rest], over(slice(0, 4))[rest])
    assert q.shape == out.shape


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *(("add", "none"), ("none", "add"), ("copy", "none"), ("none", "copy")),
        *(("copy", "zero"), ("zero", "copy"), ("add", "copy"), ("copy", "add")),
    ],
)
def test_gradients_of_halves(first, second):
    before, whole = drawn(28, 2, 4), drawn(28, 2, 4, seed=1)
    step = whole
    if {first, second} & {"none", "zero"}:
        step = whole[halves(first not in ("none", "zero"), second not in ("none", "zero"))]
    found = before.clone()
    context_parallel.thd_grad_correction(found, step, CU_SEQLENS, first, second)
    results = {"add": before + whole, "copy": whole, "none": before, "zero": torch.zeros_like(before)}
    for change, places in ((first, halves(True, False)), (second, halves(False, True))):
        assert torch.equal(found[places], results[change][places])


@pytest.mark.parametrize("mode", [0, 1])
def test_adam(mode):
    """Three steps, with and without weight decay of its own, equal torch's."""
    parameter = drawn(9, dtype=torch.float32)
    theirs = torch.nn.Parameter(parameter.clone())
    kind = torch.optim.AdamW if mode else torch.optim.Adam
    reference = kind([theirs], lr=0.1, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.2)
    first, second, skip = torch.zeros(9), torch.zeros(9), torch.zeros(1, dtype=torch.int32)
    for step in (1, 2, 3):
        theirs.grad = drawn(9, seed=step, dtype=torch.float32)
        reference.step()
        lists = [[theirs.grad], [parameter], [first], [second]]
        optimizer.multi_tensor_adam(2048, skip, lists, 0.1, 0.9, 0.99, 1e-3, step, mode, 1, 0.2)
        torch.testing.assert_close(parameter, theirs.detach())
    kept = parameter.clone()
    optimizer.multi_tensor_adam(2048, torch.ones(1), lists, 0.1, 0.9, 0.99, 1e-3, 4, mode, 1, 0.2)
    assert torch.equal(parameter, kept)


def test_adam_keeps_master_weights():
    master, grad = drawn(9, dtype=torch.float32), drawn(9, seed=1)
    parameter = master.bfloat16()
    lists = [[grad], [parameter], [torch.zeros(9)], [torch.zeros(9)], [master]]
    before = master.clone()
    optimizer.multi_tensor_adam(2048, torch.zeros(1), lists, 1e-4, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0)
    torch.testing.assert_close(master, before - 1e-4 * grad.float().sign(), atol=1e-6, rtol=0)
    assert torch.equal(parameter, master.bfloat16())


def test_norms_and_scaling():
    tensors = [drawn(3, 4), drawn(5, seed=1)]
    whole = torch.cat([tensor.float().flatten() for tensor in tensors])
    norm, each = optimizer.multi_tensor_l2norm(2048, torch.zeros(1), [tensors], True)
    torch.testing.assert_close(norm, whole.norm()[None])
    torch.testing.assert_close(each, torch.stack([tensor.float().norm() for tensor in tensors]))
    assert optimizer.multi_tensor_l2norm(2048, torch.zeros(1), [tensors], False)[1].numel() == 0
    targets, flag = [torch.empty_like(tensor) for tensor in tensors], torch.zeros(1)
    optimizer.multi_tensor_scale_tensor(2048, flag, [tensors, targets], torch.tensor([0.5]))
    assert not flag
    assert all(torch.equal(target, 0.5 * tensor) for target, tensor in zip(targets, tensors, strict=True))
    tensors[0][0, 0] = torch.inf
    optimizer.multi_tensor_scale_tensor(2048, flag, [tensors, targets], torch.tensor([0.5]))
    assert flag


def test_what_has_no_answer_refuses_with_its_name():
    module = extension.make_extension()
    with pytest.raises(NotImplementedError, match=r"transformer_engine_torch\.layernorm_fwd has no answer on a CPU"):
        module.layernorm_fwd()
    assert module.DType.kBFloat16 == 4
    assert isinstance(module.CommOverlap, type)


def test_answers_refuse_what_they_do_not_do():
    layout, out_format, bias, softmax = NAMES
    q = drawn(8, 2, 4)
    cu = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(AssertionError, match="NVTE_CAUSAL_MASK"):
        forward(q, q, q, [cu] * 2, [cu] * 2, SimpleNamespace(name="NVTE_CAUSAL_MASK"))
    assert layout.name != bias.name != softmax.name != out_format.name
