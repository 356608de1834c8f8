"""One update of low-rank adapters in real Megatron equals peft on transformers, whatever the layout and the cuts."""

import copy
import dataclasses
from pathlib import Path

import peft
import pytest
import torch

from gtpo_megatron.config.adapter import ALL_LINEAR, AdapterConfig
from gtpo_megatron.config.algorithm import GRPOConfig, ReferenceKLConfig
from gtpo_megatron.observability.metrics import merge, to_scalars
from gtpo_megatron.weights.adapter_shapes import targets_of
from gtpo_megatron.weights.adapters import tensor_names
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.param_mapping import TensorParallel
from tests.dist_utils import run_processes
from tests.distributed.expert_models import make_expert_model
from tests.distributed.family_models import FAMILIES, make_family_model
from tests.distributed.model_file import read_tensors
from tests.distributed.one_update import GRADIENT_TOLERANCE, one_update
from tests.distributed.tiny_world import (
    dense_scores,
    dense_step,
    make_config,
    make_model,
    make_rewards,
    make_rollouts,
    named_weights,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of every optional kernel it lacks
]

LAYOUTS = {
    "one": {"num_ranks": 1},
    "tp2": {"num_ranks": 2, "tensor_parallel_size": 2},
    "tp2_sp": {"num_ranks": 2, "tensor_parallel_size": 2, "sequence_parallel": True},
    "dp2": {"num_ranks": 2},
    "dp2_sharded_optimizer": {"num_ranks": 2, "distributed_optimizer": True},
    "pp2_vpp2_cp2": {
        "num_ranks": 4,
        "pipeline_parallel_size": 2,
        "virtual_pipeline_size": 2,
        "context_parallel_size": 2,
    },
    "tp2_sp_pp2_cp2_sharded_optimizer": {
        "num_ranks": 8,
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_parallel_size": 2,
        "context_parallel_size": 2,
        "distributed_optimizer": True,
    },
}
EXPERT_LAYOUTS = {
    "one": {"num_ranks": 1},
    "tp2_sp_ep2": {
        "num_ranks": 2,
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
        "expert_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
    # that of the 30B on one node: whole experts on every rank
    "pp2_sharded_optimizer": {"num_ranks": 4, "pipeline_parallel_size": 2, "distributed_optimizer": True},
}
MARKS = {"one": (), "pp2_vpp2_cp2": (), "tp2_sp": pytest.mark.slow}
"""Every other layout is in ``make nightly``."""


def with_adapters(model, folder, *, rank=4, alpha=8.0, targets=(ALL_LINEAR,), use_rslora=False):
    """peft's model with adapters that do something from the first, and the folder that they are saved in."""
    torch.manual_seed(7)
    linear = [target for target in targets if not target.startswith("experts.")]
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=ALL_LINEAR if ALL_LINEAR in targets else linear,
        target_parameters=[f"mlp.{target}" for target in targets if target not in linear] or None,
        use_rslora=use_rslora,
        lora_dropout=0.0,
    )
    adapted = peft.get_peft_model(copy.deepcopy(model), settings)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.2)
    adapted.save_pretrained(folder)
    return adapted


def adapted_config(base, layout, folder, **fields):
    config = make_config(base, layout)
    adapter = {"rank": 4, "alpha": 8.0, "path": str(folder)} | fields
    return dataclasses.replace(
        config,
        adapter=AdapterConfig(**adapter),
        # Adam's first step is lr * g / (|g| + eps): with the usual eps, the sign of g however small
        optimizer=dataclasses.replace(config.optimizer, adam_eps=1e-4),
    )


def compare(tmp_path, adapted, config, *, ref_model=None):
    """Runs the layout and holds scores, gradients, the new adapters and the merged weights against peft."""
    rollouts = make_rollouts()
    expected = dense_step(adapted, config, rollouts, make_rewards(), ref_model)
    parallel, path = config.parallel, tmp_path / "buffer"
    dealing = "one" if parallel.data_parallel_size == 1 else "split"
    ranks = run_processes(one_update, parallel.num_ranks, config, str(path), (), dealing, rollouts, timeout_s=120)
    seen = set()
    for found in ranks:
        for name in ("logprobs", "entropy", "advantages", "ref_logprobs"):
            if found.get(name) is not None:
                wanted = expected[name][found["rows"]][:, : found[name].shape[1]]
                torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=2e-5)
        seen |= compare_adapters(found, expected, config)
    assert len(seen) == len([name for name in expected["gradients"] if "lora_A" in name])
    scalars = to_scalars(merge(found["metrics"] for found in ranks if found["coordinates"].reports))
    assert scalars["policy/loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)
    assert scalars["optimizer/grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    merged = named_weights(adapted.merge_and_unload())
    for name, tensor in read_tensors(path, config.model.path).items():
        torch.testing.assert_close(tensor, merged[name], rtol=0, atol=2e-4, msg=lambda text, name=name: name + text)
    return scalars


def compare_adapters(found, expected, config):
    """Gradients and new values of a rank's adapters; returns the projections that have some."""
    parallel, arch = config.parallel, read_architecture(Path(config.model.path))
    tp = TensorParallel(parallel.tensor_parallel_size, found["coordinates"].tensor_index)
    seen = set()
    for projection, pairs in found["adapters"].items():
        seen.add(projection.name)
        weights, gradients = (
            projection.shard(*whole_pair(projection, expected[what], config.adapter, arch), tp)
            for what in ("weights", "gradients")
        )
        names = tensor_names(projection, targets_of(arch, config.adapter))  # of experts all of them together
        largest = [expected["gradients"][name.replace(".weight", ".default.weight")].abs().max() for name in names]
        for number, ((weight, gradient), *wanted) in enumerate(zip(pairs, weights, gradients, strict=True)):
            torch.testing.assert_close(weight, wanted[0], rtol=0, atol=5e-5)  # a step is up to 1e-2
            if not parallel.distributed_optimizer:  # which has the sums of a rank's own part only
                assert (gradient - wanted[1]).abs().max() <= GRADIENT_TOLERANCE * largest[min(number, 1)], projection
    return seen


def whole_pair(projection, tensors, adapter, arch):
    """The A and B of a projection among peft's tensors, as its forward pass reads them."""
    names = tensor_names(projection, targets_of(arch, adapter))
    a, b = (tensors[name.replace(".weight", ".default.weight")] for name in names)
    if projection.expert is None:
        return a, b
    num = arch.experts.num_experts
    a, b = a.reshape(num, -1, a.shape[1])[projection.expert], b.reshape(len(b), -1, num)[:, :, projection.expert]
    if arch.family == "gpt_oss" and projection.target == "experts.gate_up_proj":
        b = torch.cat([b[0::2], b[1::2]])
    return a, b


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}
    for tied in (False, True):
        folder = tmp_path_factory.mktemp("model")
        made[tied] = (folder, make_model(folder, tied=tied, num_layers=4))
    return made


@pytest.mark.parametrize("layout", [pytest.param(name, marks=MARKS.get(name, pytest.mark.nightly)) for name in LAYOUTS])
def test_an_update_on_every_layout(models, tmp_path, layout):
    folder, model = models[layout in ("tp2", "pp2_vpp2_cp2")]
    adapted = with_adapters(model, tmp_path / "adapters")
    compare(tmp_path, adapted, adapted_config(folder, LAYOUTS[layout], tmp_path / "adapters"))


@pytest.mark.parametrize("layout", ["one", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("tp2_sp",))])
def test_layers_that_are_recomputed_give_their_adapters_gradients(models, tmp_path, layout):
    folder, model = models[False]
    adapted = with_adapters(model, tmp_path / "adapters")
    config = adapted_config(folder, LAYOUTS[layout], tmp_path / "adapters")
    compare(tmp_path, adapted, dataclasses.replace(config, model=dataclasses.replace(config.model, recompute="full")))


@pytest.mark.parametrize("layout", ["one", pytest.param("tp2_sp", marks=pytest.mark.nightly)])
def test_some_projections_and_the_other_scale(models, tmp_path, layout):
    """Query and value without the key that is fused with them, as peft does by default."""
    folder, model = models[False]
    targets = ("q_proj", "v_proj", "down_proj")
    adapted = with_adapters(model, tmp_path / "adapters", targets=targets, use_rslora=True)
    config = adapted_config(folder, LAYOUTS[layout], tmp_path / "adapters", targets=targets, scaling="sqrt_rank")
    compare(tmp_path, adapted, config)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["tp2_sp", "dp2"])
@pytest.mark.parametrize("family", ["qwen3", "llama3_1", "smollm3", "olmo2", "gemma3", "granite"])
def test_families(tmp_path, family, layout):
    model = make_family_model(tmp_path / "model", FAMILIES[family])
    adapted = with_adapters(model, tmp_path / "adapters")
    compare(tmp_path, adapted, adapted_config(tmp_path / "model", LAYOUTS[layout], tmp_path / "adapters"))


@pytest.mark.parametrize(
    "layout", ["one", "tp2", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("tp2_sp",))]
)
@pytest.mark.parametrize("family", ["phi4", "glm4", "deepseek_dense", "qwen3_5"])
def test_fused_tensors_latents_and_delta_nets(tmp_path, family, layout):
    """One A over several matrices in one tensor; projections that are whole on every rank."""
    latents = (
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
        "o_proj",
    )  # peft takes other names for experts
    targets = latents if family == "deepseek_dense" else (ALL_LINEAR,)
    model = make_family_model(tmp_path / "model", FAMILIES[family])
    adapted = with_adapters(model, tmp_path / "adapters", targets=targets)
    config = adapted_config(tmp_path / "model", LAYOUTS[layout], tmp_path / "adapters", targets=targets)
    compare(tmp_path, adapted, config)


@pytest.mark.parametrize(
    "layout", ["one", *(pytest.param(name, marks=pytest.mark.nightly) for name in EXPERT_LAYOUTS if name != "one")]
)
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_experts(tmp_path, family, layout):
    """Of every expert and of attention."""
    model = make_expert_model(tmp_path / "model", family)
    arch = read_architecture(tmp_path / "model")
    targets = (*targets_of(arch, AdapterConfig(rank=4)), "experts.gate_up_proj", "experts.down_proj")
    adapted = with_adapters(model, tmp_path / "adapters", targets=targets)
    config = adapted_config(tmp_path / "model", EXPERT_LAYOUTS[layout], tmp_path / "adapters", targets=targets)
    compare(tmp_path, adapted, config)


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["experts.gate_up_proj", "experts.down_proj"])
def test_one_projection_of_experts(tmp_path, target):
    """peft then wraps one tensor, not one around the other."""
    model = make_expert_model(tmp_path / "model", "qwen3_moe")
    adapted = with_adapters(model, tmp_path / "adapters", targets=(target,))
    compare(
        tmp_path,
        adapted,
        adapted_config(tmp_path / "model", EXPERT_LAYOUTS["one"], tmp_path / "adapters", targets=(target,)),
    )


@pytest.mark.parametrize("layout", ["one", pytest.param("tp2_sp", marks=pytest.mark.nightly)])
def test_the_frozen_weights_are_the_reference_policy(models, tmp_path, layout):
    folder, model = models[False]
    adapted = with_adapters(model, tmp_path / "adapters")
    config = adapted_config(folder, LAYOUTS[layout], tmp_path / "adapters")
    config = dataclasses.replace(config, algorithm=GRPOConfig(reference_kl=ReferenceKLConfig(coef=0.5)))
    scalars = compare(tmp_path, adapted, config, ref_model=model)
    batch = make_rollouts()
    adapted = with_adapters(model, tmp_path / "again")
    logprobs, ref_logprobs = (dense_scores(one, batch)[0].detach().double() for one in (adapted, model))
    difference = (logprobs - ref_logprobs)[batch.loss_mask]
    k3 = torch.exp(-difference) - 1 + difference
    assert scalars["policy/kl_ref_nats"] == pytest.approx(float(k3.mean()), rel=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["dp2_sharded_optimizer", "tp2_sp_pp2_cp2_sharded_optimizer"])
def test_frozen_weights_that_replicas_share(models, tmp_path, layout):
    """``test_frozen_shards.py`` has the bits."""
    folder, model = models[False]
    adapted = with_adapters(model, tmp_path / "adapters")
    compare(tmp_path, adapted, adapted_config(folder, LAYOUTS[layout], tmp_path / "adapters", shard_frozen=True))


@pytest.mark.nightly
def test_frozen_experts_that_replicas_share(tmp_path):
    model = make_expert_model(tmp_path / "model", "qwen3_moe")
    adapted = with_adapters(model, tmp_path / "adapters", targets=("q_proj", "o_proj"))
    fields = {"targets": ("q_proj", "o_proj"), "shard_frozen": True}
    layout = {"num_ranks": 4, "expert_parallel_size": 2}
    compare(tmp_path, adapted, adapted_config(tmp_path / "model", layout, tmp_path / "adapters", **fields))


def angle(one, other):
    """1 - cosine."""
    return 1 - float(torch.nn.functional.cosine_similarity(one.flatten().double(), other.flatten().double(), dim=0))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["model", "float32"])
@pytest.mark.parametrize("layout", ["one", "tp2_sp", "dp2_sharded_optimizer"])
def test_over_bfloat16_weights(models, tmp_path, layout, dtype):
    """Adapters of either dtype take the direction that float32 takes, as far as bfloat16 lets transformers."""
    folder, model = models[False]
    adapted = with_adapters(model, tmp_path / "adapters")
    config = adapted_config(folder, LAYOUTS[layout], tmp_path / "adapters", dtype=dtype)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="bfloat16"))
    rollouts = make_rollouts()
    arch = read_architecture(folder)
    rounded = dense_step(copy.deepcopy(adapted).bfloat16(), config, rollouts, make_rewards())["gradients"]
    expected = dense_step(adapted, config, rollouts, make_rewards())
    dealing = "one" if config.parallel.data_parallel_size == 1 else "split"
    arguments = (config, str(tmp_path / "buffer"), (), dealing, rollouts)
    for found in run_processes(one_update, config.parallel.num_ranks, *arguments, timeout_s=120):
        tp, sides = TensorParallel(config.parallel.tensor_parallel_size, found["coordinates"].tensor_index), []
        for projection, pairs in found["adapters"].items():
            assert {weight.dtype for weight, _ in pairs} == {torch.float32 if dtype == "float32" else torch.bfloat16}
            assert {gradient.dtype for _, gradient in pairs} == {torch.float32}
            weights, gradients, theirs = (
                projection.shard(*whole_pair(projection, tensors, config.adapter, arch), tp)
                for tensors in (expected["weights"], expected["gradients"], rounded)
            )
            theirs = [one.float() for one in theirs]
            for (weight, gradient), wanted, direction, other in zip(pairs, weights, gradients, theirs, strict=True):
                # a step is up to 1e-2, and its sign that of the gradient, however small
                assert (weight.float() - wanted).abs().mean() < 3e-3
                if not config.parallel.distributed_optimizer:
                    assert angle(gradient, direction) < 0.1, projection.name  # of 16 numbers of a rank and upwards
                    sides.append((gradient.flatten(), direction.flatten(), other.flatten()))
        if sides:
            ours, exact, other = (torch.cat(side) for side in zip(*sides, strict=True))
            assert angle(ours, exact) <= 2.5 * angle(other, exact)
