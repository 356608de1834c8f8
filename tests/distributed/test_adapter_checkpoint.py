"""Checkpoints of adapters: bit-equal after a resume, small, in another layout, as peft's folder and merged."""

import dataclasses
import json
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from gtpo_megatron.config.adapter import ALL_LINEAR, AdapterConfig
from gtpo_megatron.config.algorithm import ReferenceConfig
from gtpo_megatron.errors import CheckpointError, ConfigError
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.conversion import ConversionProgress, hf_to_megatron, megatron_to_hf, megatron_to_peft
from gtpo_megatron.weights.megatron.adapters import stored_adapters
from gtpo_megatron.weights.megatron.checkpoint_reader import CheckpointReader
from tests.dist_utils import run_processes
from tests.distributed.expert_models import make_expert_model
from tests.distributed.family_models import FAMILIES, make_family_model
from tests.distributed.test_actor_checkpoint import first_half, merged, resumed, save, start, unbroken
from tests.distributed.tiny_world import VOCAB, make_config, make_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore"),  # Megatron and torch's checkpoint warn of deprecations of their own
]

PP2_VPP2 = {"num_ranks": 2, "pipeline_parallel_size": 2, "virtual_pipeline_size": 2}
ONE = {"num_ranks": 1}
TP2_SP = {"num_ranks": 2, "tensor_parallel_size": 2, "sequence_parallel": True}
DP2_SHARDED = {"num_ranks": 2, "distributed_optimizer": True}
PP2_DP2_SHARDED = {
    "num_ranks": 4,
    "pipeline_parallel_size": 2,
    "virtual_pipeline_size": 2,
    "distributed_optimizer": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("model")
    make_model(made, tied=False, num_layers=4)
    return made


def config_of(folder, layout, **adapter):
    config = make_config(folder, layout)
    return dataclasses.replace(config, adapter=AdapterConfig(**{"rank": 4, "alpha": 8.0} | adapter))


@pytest.mark.parametrize(
    ("layout", "model", "adapter"),
    [
        pytest.param(TP2_SP, "float32", "model", id="tp2_sp"),
        pytest.param(ONE, "bfloat16", "float32", id="one-float32-over-bfloat16", marks=pytest.mark.slow),
        pytest.param(DP2_SHARDED, "bfloat16", "float32", id="dp2-float32-over-bfloat16", marks=pytest.mark.nightly),
        pytest.param(TP2_SP, "bfloat16", "model", id="tp2_sp-bfloat16", marks=pytest.mark.nightly),
        pytest.param(PP2_DP2_SHARDED, "float32", "model", id="pp2_dp2", marks=pytest.mark.nightly),
    ],
)
def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(folder, tmp_path, layout, model, adapter):
    config, checkpoint = config_of(folder, layout, dtype=adapter), tmp_path / "checkpoint"
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=model))
    checkpoint.mkdir()
    whole = run_processes(unbroken, config.parallel.num_ranks, config, str(checkpoint), timeout_s=120)
    stored = CheckpointReader(checkpoint, verify="none").tensors
    assert all("adapters." in name for name in stored)  # of weights, moments and masters nothing else
    assert sum(name.startswith("adapters.") for name in stored) == 4 * 7 * 2  # layers, projections, A and B
    checksums = merged(checksums for *_, checksums in whole)
    again = run_processes(resumed, config.parallel.num_ranks, config, str(checkpoint), checksums, timeout_s=120)
    for (metrics, weights, *_), (metrics_again, weights_again, _) in zip(whole, again, strict=True):
        assert metrics == metrics_again
        assert all(torch.equal(weights[name], weights_again[name]) for name in weights)


@pytest.mark.parametrize("goes_on", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["whole", "shared"])
def test_a_run_goes_on_with_frozen_weights_shared_or_not(folder, tmp_path, goes_on):
    config, checkpoint = config_of(folder, DP2_SHARDED, shard_frozen=True), tmp_path / "checkpoint"
    checkpoint.mkdir()
    shared = run_processes(unbroken, 2, config, str(checkpoint), timeout_s=150)
    checksums = merged(checksums for *_, checksums in shared)
    arguments = (config_of(folder, DP2_SHARDED, shard_frozen=goes_on), str(checkpoint), checksums)
    for (metrics, weights, *_), (metrics_again, weights_again, _) in zip(
        shared, run_processes(resumed, 2, *arguments, timeout_s=150), strict=True
    ):
        assert metrics == metrics_again
        assert all(torch.equal(weights[name], weights_again[name]) for name in weights)


def scores_of(model):
    ids = torch.arange(12)[None] * 4 % VOCAB
    with torch.no_grad():
        return torch.log_softmax(model(ids).logits, -1)


def load_and_save(rank, world_size, init_method, config, source, checksums, target):
    actor = start(rank, init_method, config)
    actor.checkpoint.load(Path(source), checksums=checksums)
    save(actor, target)


@pytest.fixture(scope="module")
def checkpoint(folder, tmp_path_factory):
    """Of two steps; and its files' checksums."""
    made = tmp_path_factory.mktemp("checkpoint")
    found = run_processes(first_half, 2, config_of(folder, TP2_SP), str(made), timeout_s=120)
    return made, merged(checksums for checksums, _ in found)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [ONE, PP2_VPP2], ids=["one", "pp2_vpp2"])
def test_it_moves_into_another_layout(folder, checkpoint, tmp_path, layout):
    config = config_of(folder, layout)
    arguments = (config, str(checkpoint[0]), checkpoint[1], str(tmp_path))
    run_processes(load_and_save, config.parallel.num_ranks, *arguments, timeout_s=120)
    one, other = (CheckpointReader(path, verify="none") for path in (checkpoint[0], tmp_path))
    names = [name for name in one.tensors if name.startswith("adapters.")]
    assert set(names) == {name for name in other.tensors if name.startswith("adapters.")}
    assert all(torch.equal(one.read([name])[name], other.read([name])[name]) for name in names)


@pytest.mark.parametrize("kind", ["hf", "converted"])
def test_peft_and_the_merged_folder_say_what_the_run_says(folder, checkpoint, tmp_path, kind):
    """Frozen weights in either kind of folder; peft reads what it would have written itself."""
    base = folder
    if kind == "converted":
        base = tmp_path / "converted"
        hf_to_megatron(folder, base, make_config(folder, ONE).parallel, progress=ConversionProgress())
    megatron_to_peft(checkpoint[0], folder, tmp_path / "peft", verify="none")
    said = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"]) == (4, 8.0)
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "peft")
    assert not torch.equal(scores_of(adapted), scores_of(AutoModelForCausalLM.from_pretrained(folder)))
    # a checkpoint of ranks alone has no manifest
    megatron_to_hf(checkpoint[0], base, tmp_path / "merged", progress=ConversionProgress(), verify="none")
    merged_model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(scores_of(merged_model), scores_of(adapted), rtol=0, atol=1e-5)


def test_a_run_begins_with_the_adapters_of_a_folder(folder, checkpoint, tmp_path):
    """What one run wrote is what the next begins with."""
    megatron_to_peft(checkpoint[0], folder, tmp_path / "peft", verify="none")

    def weights(rank, world_size, init_method, config, load):
        actor = start(rank, init_method, config)
        if load:
            actor.checkpoint.load(checkpoint[0], checksums=checkpoint[1])
        return {name: tensor.clone() for name, tensor in actor._weights().items()}

    [loaded] = run_processes(weights, 1, config_of(folder, ONE), True)
    [begun] = run_processes(weights, 1, config_of(folder, ONE, path=str(tmp_path / "peft")), False)
    assert all(torch.equal(loaded[name], begun[name]) for name in loaded)


EXPERTS = (ALL_LINEAR, "experts.gate_up_proj", "experts.down_proj")
EP2 = {**TP2_SP, "expert_parallel_size": 2, "expert_tensor_parallel_size": 1}


@pytest.mark.parametrize(
    ("family", "layout", "targets"),
    [
        ("gpt_oss", EP2, EXPERTS),
        ("phi4", TP2_SP, (ALL_LINEAR,)),
        pytest.param("qwen3_moe", EP2 | {"distributed_optimizer": True}, EXPERTS, marks=pytest.mark.nightly),
        pytest.param("mixtral", EP2, EXPERTS, marks=pytest.mark.nightly),
        pytest.param("qwen3_5", TP2_SP, (ALL_LINEAR,), marks=pytest.mark.nightly),
    ],
)
def test_experts_and_tensors_of_several_projections(tmp_path, family, layout, targets):
    """Resumed to the bit, in another layout the same tensors, and outside what the run computes."""
    model, made = tmp_path / "model", tmp_path / "checkpoint"
    if targets == EXPERTS:
        make_expert_model(model, family)
    else:
        make_family_model(model, FAMILIES[family])
    made.mkdir()
    config = config_of(model, layout, targets=targets)
    whole = run_processes(unbroken, 2, config, str(made), timeout_s=180)
    checksums = merged(checksums for *_, checksums in whole)
    again = run_processes(resumed, 2, config, str(made), checksums, timeout_s=180)
    for (metrics, weights, *_), (metrics_again, weights_again, _) in zip(whole, again, strict=True):
        assert metrics == metrics_again
        assert all(torch.equal(weights[name], weights_again[name]) for name in weights)
    (tmp_path / "one").mkdir()
    alone = ONE | {"distributed_optimizer": config.parallel.distributed_optimizer}  # which cannot change
    arguments = (config_of(model, alone, targets=targets), str(made), checksums, str(tmp_path / "one"))
    run_processes(load_and_save, 1, *arguments, timeout_s=180)
    one, other = (CheckpointReader(path, verify="none") for path in (made, tmp_path / "one"))
    names = [name for name in one.tensors if name.startswith("adapters.")]
    assert set(names) == {name for name in other.tensors if name.startswith("adapters.")}
    assert all(torch.equal(one.read([name])[name], other.read([name])[name]) for name in names)
    megatron_to_peft(made, model, tmp_path / "peft", verify="none")
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "peft")
    assert not torch.equal(scores_of(adapted), scores_of(AutoModelForCausalLM.from_pretrained(model)))
    megatron_to_hf(made, model, tmp_path / "merged", progress=ConversionProgress(), verify="none")
    merged_model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(scores_of(merged_model), scores_of(adapted), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_other_frozen_weights_are_refused(folder, checkpoint, tmp_path):
    model = make_model(tmp_path / "other", tied=False, num_layers=4)
    with torch.no_grad():
        model.model.norm.weight.add_(1e-3)
    model.save_pretrained(tmp_path / "other")

    def load(rank, world_size, init_method, config, message):
        with pytest.raises(CheckpointError, match=message) as error:
            start(rank, init_method, config).checkpoint.load(checkpoint[0], checksums=checkpoint[1])
        assert "\n" not in str(error.value)

    stored = stored_adapters(checkpoint[0], read_architecture(folder))
    stored.check_frozen(folder)
    with pytest.raises(CheckpointError, match="the adapters were trained over other weights; name their folder"):
        stored.check_frozen(tmp_path / "other")
    run_processes(load, 1, config_of(tmp_path / "other", ONE), "other frozen weights: model.safetensors has checksum")
    run_processes(load, 1, config_of(folder, ONE, alpha=4.0), "adapters times 2, this run multiplies them by 1; resume")
    run_processes(
        load,
        1,
        make_config(folder, ONE),
        "trained adapters, this one trains all weights; resume with its --adapter.rank",
    )


def test_a_reference_folder_beside_adapters_is_refused(folder):
    config = config_of(folder, ONE)
    for reference in (
        ReferenceConfig(path=str(folder), measured=True),
        ReferenceConfig(reset_every_steps=2, measured=True),
    ):
        with pytest.raises(ConfigError, match="the frozen weights below the adapters are the reference policy"):
            dataclasses.replace(config, reference=reference)
