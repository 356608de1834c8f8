"""The actor with Transformer Engine's layers, packed, in bfloat16, with its Adam sharded, equals transformers.

Every family, every axis of the layout, and recomputation. Bounds are about twice what was seen.
"""

import copy

import pytest
import torch

from gtpo_megatron.config.adapter import ALL_LINEAR, AdapterConfig
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.weights.conversion import ConversionProgress, hf_to_megatron
from gtpo_megatron.weights.param_mapping import TensorParallel
from tests.dist_utils import run_processes
from tests.distributed.one_update import one_update
from tests.distributed.tiny_world import dense_step, make_rewards, make_rollouts, own_tokens
from tests.gpu_stack.models import STACK_FAMILIES, make_model
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
    return {name: (folder / name, make_model(folder / name, name)) for name in STACK_FAMILIES}


def check(found):
    assert found.mean_gap < 0.02, found
    assert found.largest_gap < 0.06, found
    assert found.entropy_gap < 3e-3, found
    assert found.loss < 1e-6, found
    assert found.norm < 2e-3, found
    assert found.direction > 0.995, found
    assert found.length < 0.02, found


@pytest.mark.parametrize("family", STACK_FAMILIES)
def test_every_family(models, tmp_path, family):
    folder, model = models[family]
    found = te_update(tmp_path, model, te_config(folder, {"num_ranks": 1}))
    check(found)
    # a factor of attention, which the fused rotary embedding would leave out, and pairs of neighbours take Megatron's
    unfused = ("qwen2_yarn", "olmo3", "ernie4_5", "glm4", "glm")
    assert set(found.calls) == (ENTRY_POINTS if family in unfused else ENTRY_POINTS | FUSED_ROPE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_axis(models, tmp_path, layout):
    folder, model = models["qwen2_tied" if layout == "pp2" else "qwen2"]
    found = te_update(tmp_path, model, te_config(folder, LAYOUTS[layout]))
    check(found)
    wanted = ENTRY_POINTS | FUSED_ROPE
    assert set(found.calls) == (wanted | RING if layout == "cp2" else wanted)


@pytest.mark.parametrize(
    ("family", "layout"), [("deepseek_dense", "tp2_sp"), ("deepseek_dense", "cp2"), ("qwen3_next_dense", "tp2_sp")]
)
def test_what_is_whole_on_every_rank(models, tmp_path, family, layout):
    """Projections to latents; the gates of a delta net."""
    folder, model = models[family]
    check(te_update(tmp_path, model, te_config(folder, LAYOUTS[layout])))


@pytest.mark.parametrize("family", ["mistral_window", "qwen3_next_dense"])
def test_context_parallel_ranks_that_share_heads(models, tmp_path, family):
    """Windows, which Transformer Engine's ring does not have; delta nets, whose exchange is ours."""
    folder, model = models[family]
    found = te_update(tmp_path, model, te_config(folder, LAYOUTS["cp2"]))
    check(found)
    assert not RING & set(found.calls)


@pytest.mark.parametrize("layout", [{"num_ranks": 1}, LAYOUTS["tp2_sp"]], ids=["one", "tp2_sp"])
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen2", (ALL_LINEAR,)),
        ("deepseek_dense", (ALL_LINEAR,)),
        ("phi4", (ALL_LINEAR,)),
    ],
)
def test_adapters_read_what_their_layers_read(models, tmp_path, family, targets, layout):
    """Transformer Engine fuses norms into the layers; B begins at 0, so its gradient is that of W times A.

    Frozen weights are in a converted folder, where norms have the names that Transformer Engine's layers would give.
    """
    from gtpo_megatron.actor.model.adapters import new_adapter  # imports Megatron, which warns

    folder, model = models[family]
    converted = tmp_path / "converted"
    hf_to_megatron(folder, converted, ParallelConfig(num_ranks=1), progress=ConversionProgress())
    config = te_config(converted, layout, adapter=AdapterConfig(rank=4, targets=targets))
    rollouts = make_rollouts(loss_mask=own_tokens())
    expected = dense_step(copy.deepcopy(model), config, rollouts, make_rewards())["gradients"]
    arguments = (config, str(tmp_path / "weights"), (), "one", rollouts)
    for found in run_processes(one_update, config.parallel.num_ranks, *arguments, timeout_s=150):
        tp = TensorParallel(config.parallel.tensor_parallel_size, found["coordinates"].tensor_index)
        assert found["adapters"]
        for projection, (_, *blocks) in found["adapters"].items():
            a, _ = new_adapter(projection, config=config.adapter, seed=config.seed)
            of_weights = torch.cat(
                [expected[one.tensor][one.first : one.first + one.rows] for one in projection.blocks]
            )
            _, *wanted = projection.shard(a, of_weights @ a.t(), tp)
            for (_, gradient), one in zip(blocks, wanted, strict=True):
                assert gradient.shape == one.shape
                cosine = torch.nn.functional.cosine_similarity(gradient.float().flatten(), one.flatten(), dim=0)
                assert cosine > 0.99 or not one.abs().max(), f"{projection.name}: {cosine}"


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation(models, tmp_path, recompute):
    folder, model = models["qwen2"]
    found = te_update(tmp_path, model, te_config(folder, {"num_ranks": 1}, recompute=recompute))
    check(found)
    plain = 4 * 3  # layers, micro-batches that are scored
    assert found.calls["fused_attn_fwd"] == 3 * plain
