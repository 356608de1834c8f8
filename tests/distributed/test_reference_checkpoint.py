"""A reference policy comes back with a checkpoint: bit-equal, in another layout too, and never as another one."""

import dataclasses
from pathlib import Path

import pytest
import torch

from gtpo_megatron.config.algorithm import GRPOConfig, ReferenceConfig, ReferenceKLConfig
from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.weights.megatron.checkpoint_reader import CheckpointReader
from tests.dist_utils import run_processes
from tests.distributed.expert_models import make_expert_model
from tests.distributed.test_actor_checkpoint import first_half, merged, resumed, save, start, unbroken
from tests.distributed.tiny_world import make_config, make_model

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore"),  # Megatron and torch's checkpoint warn of deprecations of their own
]

LAYOUTS = {
    "tp2": {"num_ranks": 2, "tensor_parallel_size": 2},
    "vpp2_cp2_sharded_optimizer": {
        "num_ranks": 4,
        "pipeline_parallel_size": 2,
        "virtual_pipeline_size": 2,
        "context_parallel_size": 2,
        "distributed_optimizer": True,
    },
    "ep2": {"num_ranks": 2, "expert_parallel_size": 2},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The dense model, and the mixture of experts."""
    folders = {has_experts: tmp_path_factory.mktemp("model") for has_experts in (False, True)}
    make_model(folders[False], tied=False, num_layers=4)
    make_expert_model(folders[True], "glm4_moe", num_layers=4)
    return folders


def config_of(models, layout, reset_every_steps):
    config = make_config(models["expert_parallel_size" in layout], layout)
    return dataclasses.replace(
        config,
        algorithm=GRPOConfig(reference_kl=ReferenceKLConfig(coef=0.5)),
        reference=ReferenceConfig(reset_every_steps=reset_every_steps),
    )


# reset at the step of the checkpoint and while nothing is written; while the checkpoint is written; never
@pytest.mark.parametrize("reset_every_steps", [2, 3, 0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(models, tmp_path, layout, reset_every_steps):
    config = config_of(models, LAYOUTS[layout], reset_every_steps)
    folder, num_ranks = tmp_path / "checkpoint", config.parallel.num_ranks
    folder.mkdir()
    whole = run_processes(unbroken, num_ranks, config, str(folder), timeout_s=120)
    keys = CheckpointReader(folder, verify="none").tensors
    assert any(key.startswith("reference.") for key in keys) == (reset_every_steps == 2)
    checksums = merged(checksums for *_, checksums in whole)
    again = run_processes(resumed, num_ranks, config, str(folder), checksums, timeout_s=120)
    for (metrics, weights, *_), (metrics_again, weights_again, _) in zip(whole, again, strict=True):
        assert metrics == metrics_again
        assert all(torch.equal(weights[name], weights_again[name]) for name in weights)


def load_and_save(rank, world_size, init_method, config, source, checksums, target):
    actor = start(rank, init_method, config)
    first = {name: value.clone() for name, value in actor._reference.values().items()}
    actor.checkpoint.load(Path(source), checksums=checksums)
    assert actor._reference.reset_step == 2
    assert any(not torch.equal(first[name], value) for name, value in actor._reference.values().items())
    save(actor, target)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ({"num_ranks": 2, "tensor_parallel_size": 2}, {"num_ranks": 2, "pipeline_parallel_size": 2}),
        (
            {"num_ranks": 2, "tensor_parallel_size": 2, "sequence_parallel": True, "distributed_optimizer": True},
            {"num_ranks": 4, "pipeline_parallel_size": 2, "virtual_pipeline_size": 2, "distributed_optimizer": True},
        ),
        (
            {"num_ranks": 4, "pipeline_parallel_size": 2, "expert_parallel_size": 2},
            {"num_ranks": 2, "tensor_parallel_size": 2, "sequence_parallel": True, "expert_parallel_size": 1},
        ),
    ],
    ids=["TP2 to PP2", "TP2 SP to PP2 VPP2 DP2, sharded optimizer", "EP2 PP2 to TP2 ETP2"],
)
def test_it_moves_into_another_layout(models, tmp_path, source, target):
    folders = [tmp_path / name for name in ("source", "target")]
    for folder in folders:
        folder.mkdir()
    configs = [config_of(models, layout, reset_every_steps=2) for layout in (source, target)]
    before = run_processes(first_half, configs[0].parallel.num_ranks, configs[0], str(folders[0]), timeout_s=120)
    checksums = merged(checksums for checksums, _ in before)
    run_processes(
        load_and_save,
        configs[1].parallel.num_ranks,
        configs[1],
        str(folders[0]),
        checksums,
        str(folders[1]),
        timeout_s=120,
    )
    one, other = (CheckpointReader(folder, verify="none") for folder in folders)
    assert set(one.tensors) == set(other.tensors)
    names = [name for name in one.tensors if name.startswith("reference.")]
    assert len(names) == sum(not name.startswith(("reference.", "optimizer.")) for name in one.tensors)
    for name in names:
        left, right = (reader.read([name])[name] for reader in (one, other))
        rows = min(len(left), len(right))  # TP 2 pads the vocabulary
        assert torch.equal(left[:rows], right[:rows])
        live = one.read([name.removeprefix("reference.")])[name.removeprefix("reference.")]
        assert torch.equal(left, live)  # the reset of step 2, whose checkpoint it is


def test_another_reference_is_refused_in_one_line(models, tmp_path):
    """It is named by its files' checksums until it is reset."""
    config = config_of(models, {"num_ranks": 1}, reset_every_steps=0)
    folder, moved, other = tmp_path / "checkpoint", tmp_path / "moved", tmp_path / "other"
    folder.mkdir()
    make_model(moved, tied=False, num_layers=4)
    model = make_model(other, tied=False, num_layers=4)
    with torch.no_grad():
        model.model.norm.weight.add_(1e-3)
    model.save_pretrained(other)
    [(checksums, _)] = run_processes(first_half, 1, config, str(folder), timeout_s=120)

    def load(rank, world_size, init_method, config, message):
        actor = start(rank, init_method, config)
        if message is None:
            actor.checkpoint.load(folder, checksums=checksums)
            return
        with pytest.raises(CheckpointError, match=message) as error:
            actor.checkpoint.load(folder, checksums=checksums)
        assert "\n" not in str(error.value)

    def with_path(path):
        return dataclasses.replace(config, reference=ReferenceConfig(path=str(path)))

    # the same weights in another folder are the same policy
    run_processes(load, 1, with_path(moved), None)
    run_processes(load, 1, with_path(other), "another reference policy: model.safetensors has checksum .*, expected")
    plain = dataclasses.replace(config, algorithm=GRPOConfig())
    again = tmp_path / "plain"
    again.mkdir()
    [(plain_checksums, _)] = run_processes(first_half, 1, plain, str(again), timeout_s=120)

    def load_plain(rank, world_size, init_method):
        with pytest.raises(CheckpointError, match="is of a run without a reference policy; resume with"):
            start(rank, init_method, config).checkpoint.load(again, checksums=plain_checksums)

    run_processes(load_plain, 1)
