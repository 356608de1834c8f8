"""Shares of the peak are those of the measured files, and nothing else between and beyond than the rule says."""

import json
from pathlib import Path

import pytest

import recipes
from benchmarks.gpu_proof.page import values_of
from gtpo_megatron.companions.planner.efficiency import ADAPTERS, ALL_WEIGHTS, MEASURED_TOKENS, trainer_shares
from gtpo_megatron.companions.planner.hardware import GPUS, gpu_of_device

ROOT = Path(recipes.__path__[0]).parent
H100 = GPUS["h100"]


def found(row):
    """Figures of a row's section, by name."""
    parts = json.loads((ROOT / row.source).read_text(encoding="utf-8"))
    for name in ("training", "adapters"):
        if name in parts and (figures := values_of(parts[name], f"{row.section}: score and update")):
            return parts[name]["facts"]["device"], figures
    raise AssertionError(f"{row.section} is not in {row.source}")


@pytest.mark.parametrize("row", sorted({*ALL_WEIGHTS, *ADAPTERS}, key=lambda row: row.section), ids=str)
def test_a_row_is_what_its_file_says(row):
    device, figures = found(row)
    assert device.startswith(row.device)
    peak = GPUS[gpu_of_device(device)].bf16_flops / 1e12
    assert row.score == pytest.approx(figures["score: model's operations"] / peak, abs=6e-4)
    # the same tokens are scored and updated
    tokens = figures["score: rate"] * figures["score: time"]
    work = figures["update: model's operations"] * tokens / figures["update: rate"]
    if "recomputed" in row.section:
        work += figures["score: model's operations"] * figures["score: time"]
    assert row.update == pytest.approx(work / figures["forward_backward: time"] / peak, abs=2e-3)
    assert figures["layers of"] == "Megatron, local"


def test_all_were_measured_with_the_same_micro_batches():
    torch = pytest.importorskip("torch")
    from benchmarks.gpu_proof.sizes import sizes_of

    sizes = sizes_of(torch.device("cpu"), small=False)
    known = {size.name: size for size in (*sizes.models, sizes.whole, *sizes.adapted)}
    for row in (*ALL_WEIGHTS, *ADAPTERS):
        assert known[row.section].micro_batch_tokens == MEASURED_TOKENS
        assert known[row.section].config["hidden_size"] == row.hidden_size


@pytest.mark.parametrize("has_adapter", [False, True])
def test_a_measured_width_has_what_was_measured(has_adapter):
    for row in ADAPTERS if has_adapter else ALL_WEIGHTS:
        shares = trainer_shares(row.hidden_size, H100, has_adapter=has_adapter)
        assert (shares.score, shares.update) == pytest.approx((row.score, row.update))
        assert shares.basis == (row,)


def test_between_two_widths_the_share_is_linear_in_the_logarithm():
    middle = trainer_shares(1792, H100, has_adapter=False)  # 896 x 2 = 3584 / 2
    assert middle.score == pytest.approx((0.118 + 0.502) / 2)
    assert middle.update == pytest.approx((0.154 + 0.434) / 2)
    assert middle.basis == ALL_WEIGHTS


def test_beyond_what_was_measured_nothing_is_made_up():
    for width, row in ((512, ALL_WEIGHTS[0]), (8192, ALL_WEIGHTS[-1])):
        shares = trainer_shares(width, H100, has_adapter=False)
        assert (shares.score, shares.update) == pytest.approx((row.score, row.update))
        assert shares.basis == (row,)


def test_a_slower_gpu_waits_less_for_its_host():
    """At a quarter of the peak products of half the width last as long."""
    quarter = H100.__class__(
        memory_gib=80, bf16_flops=H100.bf16_flops / 4, hbm_bytes_per_s=1, nvlink_bytes_per_s=1, network_bytes_per_s=1
    )
    slow = trainer_shares(896, quarter, has_adapter=False)
    assert slow.score == pytest.approx(trainer_shares(1792, H100, has_adapter=False).score)
    assert not slow.is_same_gpu
    assert "this GPU was not measured" in slow.said(has_experts=False)


def test_the_page_says_where_a_share_is_from():
    said = trainer_shares(2048, H100, has_adapter=False).said(has_experts=True)
    assert "35% of the peak in scores and 32% in updates, between those measured at a hidden size of 896" in said
    assert "gpu_proof_h100.json" in said
    assert "experts at 35%, assumed" in said
    assert "Transformer Engine's were not measured" in said
