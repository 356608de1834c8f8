"""Who computes float32 products on a CPU: the rule over processors, and which products may be rounded."""

import pytest
import torch

from gtpo_megatron.kernels import cpu_products
from gtpo_megatron.kernels.cpu_products import (
    BackwardPasses,
    choose_products,
    has_amx,
    leaves_avx512_to_onednn,
    products_by_mkl,
    products_of,
)

EPYC = {"architecture": "x86_64", "cpu_name": "AMD EPYC", "avx2": True, "avx512_f": True, "avx512_bf16": True}


@pytest.fixture(autouse=True)
def torch_as_it_was(monkeypatch):
    monkeypatch.setattr(BackwardPasses, "are_rounded", False)
    before = torch.backends.mkldnn.matmul.fp32_precision
    yield
    torch.backends.mkldnn.matmul.fp32_precision = before


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (EPYC, True),
        (EPYC | {"avx512_bf16": False}, True),
        (EPYC | {"amx_tile": True, "amx_bf16": True}, False),
        (EPYC | {"amx_fp16": True}, False),
        (EPYC | {"avx512_f": False}, False),
        (EPYC | {"cpu_name": "Intel(R) Xeon(R) Platinum 8380"}, False),
        (EPYC | {"architecture": "aarch64"}, False),
        ({}, False),
    ],
)
def test_onednn_only_where_it_cannot_round(processor, expected):
    assert leaves_avx512_to_onednn(processor) is expected


def test_products_are_float32_whoever_computes_them():
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(300, 576, generator=generator), torch.randn(576, 1536, generator=generator)
    exact = left.double() @ right.double()
    for hidden_size in (64, 576):
        is_chosen = choose_products(hidden_size)
        assert is_chosen is (hidden_size >= 512 and leaves_avx512_to_onednn(torch.cpu.get_capabilities()))
        # sums of 576 terms of size 1; rounded operands would make it 0.1
        assert float((left @ right - exact).abs().max()) < 1e-3


def test_a_processor_that_rounds_all_the_same_is_left_to_mkl(monkeypatch, caplog):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: EPYC)
    monkeypatch.setattr(cpu_products, "_error_of_a_product", lambda: 2e-3)
    assert not choose_products(576)
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"
    assert "rounds float32 products" in caplog.text


@pytest.mark.parametrize(
    ("amx", "hidden_size", "may", "expected"),
    [(True, 576, True, True), (True, 64, True, False), (False, 576, True, False), (True, 576, False, False)],
)
def test_backward_passes_are_rounded_with_amx_and_large_products(monkeypatch, caplog, amx, hidden_size, may, expected):
    monkeypatch.setattr(cpu_products, "has_amx", lambda: amx)
    with caplog.at_level("INFO", logger=cpu_products.__name__):
        choose_products(hidden_size, may_round_gradients=may)
    assert BackwardPasses.are_rounded is expected
    assert ("rounds their operands" in caplog.text) is expected


def test_gradients_of_rounded_products_are_close(monkeypatch):
    monkeypatch.setattr(BackwardPasses, "are_rounded", True)
    generator = torch.Generator().manual_seed(0)
    inputs, weight = torch.randn(300, 576, generator=generator), torch.randn(576, 600, generator=generator)
    exact = torch.autograd.grad((inputs.requires_grad_() @ weight.requires_grad_()).square().sum(), (inputs, weight))
    passes = BackwardPasses()
    loss = (inputs @ weight).square().sum()
    passes.begin_with(loss)
    found = torch.autograd.grad(loss, (inputs, weight))
    passes.end()
    for mine, other in zip(found, exact, strict=True):
        assert (mine - other).norm() < 4e-3 * other.norm()
        # without AMX oneDNN has the permission and makes no use of it
        error = float((mine - other).norm() / other.norm())
        assert error > 1e-4 if has_amx() else error < 1e-6
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"


def test_a_block_of_mkl_s_products_leaves_the_choice_as_it_was():
    matmul = torch.backends.mkldnn.matmul
    for choice in ("bf16", "none"):
        matmul.fp32_precision = choice
        with products_by_mkl():
            assert matmul.fp32_precision == "none"
        assert matmul.fp32_precision == choice


@pytest.mark.parametrize("choice", ["bf16", "none"])
@pytest.mark.parametrize(("dtype", "amx", "within"), [
    (torch.bfloat16, True, "bf16"), (torch.bfloat16, False, None), (torch.float32, True, None)
])  # fmt: skip
def test_only_what_is_bfloat16_may_be_rounded_and_only_by_tiles(monkeypatch, choice, dtype, amx, within):
    monkeypatch.setattr(cpu_products, "has_amx", lambda: amx)
    matmul = torch.backends.mkldnn.matmul
    matmul.fp32_precision = choice
    with products_of(torch.zeros(1, dtype=dtype)):
        assert matmul.fp32_precision == (within or choice)
    assert matmul.fp32_precision == choice


def test_float32_products_of_bfloat16_numbers_are_exact_but_for_their_sums():
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(400, 576, generator=generator).bfloat16() for _ in range(2))
    with products_of(left):
        product = left.float() @ right.float().T
    # sums of 576 terms of size 1; a result in bfloat16 would be off by 0.25
    assert float((product - left.double() @ right.double().T).abs().max()) < 2e-3
