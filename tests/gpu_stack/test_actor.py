"""The actor with Transformer Engine's layers, packed, in bfloat16, with its Adam sharded, equals transformers.

Every family, every axis of the layout, and recomputation. Bounds are about twice what was seen.
"""

import pytest

from tests.gpu_stack.models import FAMILIES, make_model
from tests.gpu_stack.te_updates import te_config, te_update

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron and Transformer Engine warn of deprecations of their own

LAYOUTS = {
    "tp2_sp": {"num_ranks": 2, "tensor_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"num_ranks": 2, "pipeline_parallel_size": 2},
    "pp2_vpp2": {"num_ranks": 2, "pipeline_parallel_size": 2, "virtual_pipeline_size": 2},
    "pp2_uneven": {"num_ranks": 2, "pipeline_parallel_size": 2, "last_stage_layers": 1},
    "cp2": {"num_ranks": 2, "context_parallel_size": 2},
    "dp2": {"num_ranks": 2},
}

ENTRY_POINTS = {
    *("generic_gemm", "rmsnorm_fwd", "rmsnorm_bwd", "fused_attn_fwd", "fused_attn_bwd"),
    *("multi_tensor_adam", "multi_tensor_l2norm", "multi_tensor_scale_tensor"),
}
FUSED_ROPE = {"fused_rope_forward", "fused_rope_backward"}
RING = {
    *("thd_read_half_tensor", "thd_second_half_lse_correction", "thd_read_second_half_lse"),
    *("thd_out_correction", "thd_grad_correction"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: (folder / name, make_model(folder / name, name)) for name in FAMILIES}


def check(found):
    assert found.mean_gap < 0.02, found
    assert found.largest_gap < 0.06, found
    assert found.entropy_gap < 3e-3, found
    assert found.loss < 1e-6, found
    assert found.norm < 2e-3, found
    assert found.direction > 0.995, found
    assert found.length < 0.02, found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(models, tmp_path, family):
    folder, model = models[family]
    found = te_update(tmp_path, model, te_config(folder, {"num_ranks": 1}))
    check(found)
    # a factor of attention, which the fused rotary embedding would leave out, and pairs of neighbours take Megatron's
    assert set(found.calls) == (ENTRY_POINTS if family in ("qwen2_yarn", "ernie4_5") else ENTRY_POINTS | FUSED_ROPE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_axis(models, tmp_path, layout):
    folder, model = models["qwen2_tied" if layout == "pp2" else "qwen2"]
    found = te_update(tmp_path, model, te_config(folder, LAYOUTS[layout]))
    check(found)
    wanted = ENTRY_POINTS | FUSED_ROPE
    assert set(found.calls) == (wanted | RING if layout == "cp2" else wanted)


@pytest.mark.parametrize("layout", ["tp2_sp", "cp2"])
def test_latents_are_whole_on_every_rank(models, tmp_path, layout):
    folder, model = models["deepseek_dense"]
    check(te_update(tmp_path, model, te_config(folder, LAYOUTS[layout])))


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation(models, tmp_path, recompute):
    folder, model = models["qwen2"]
    found = te_update(tmp_path, model, te_config(folder, {"num_ranks": 1}, recompute=recompute))
    check(found)
    plain = 4 * 3  # layers, micro-batches that are scored
    assert found.calls["fused_attn_fwd"] == 3 * plain
