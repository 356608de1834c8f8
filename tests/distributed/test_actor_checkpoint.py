"""A rank that was killed and came back goes on to the last bit; a bad gradient never reaches the weights."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from gtpo_megatron.batch import RolloutShard
from gtpo_megatron.companions.verify_resume.compare import first_difference
from gtpo_megatron.config.algorithm import GRPOConfig, ReferenceConfig, ReferenceKLConfig
from gtpo_megatron.config.model import BalanceConfig
from gtpo_megatron.errors import CheckpointError, NumericsError
from gtpo_megatron.observability.metrics import deterministic, to_scalars
from gtpo_megatron.weights.megatron.checkpoint_reader import CheckpointReader
from tests.dist_utils import run_processes
from tests.distributed.expert_models import EXPERT_FAMILIES, make_expert_model
from tests.distributed.model_file import whole_weights
from tests.distributed.tiny_world import make_config, make_model, make_rewards, make_rollouts

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Megatron and torch's checkpoint warn of deprecations of their own
]

LAYOUTS = {
    "tp2": {"num_ranks": 2, "tensor_parallel_size": 2},
    "dp2_sharded_optimizer": {"num_ranks": 2, "distributed_optimizer": True},
    "pp2": {"num_ranks": 2, "pipeline_parallel_size": 2},
    "vpp2_cp2_sharded_optimizer": {
        "num_ranks": 4,
        "pipeline_parallel_size": 2,
        "virtual_pipeline_size": 2,
        "context_parallel_size": 2,
        "distributed_optimizer": True,
    },
    "ep2": {"num_ranks": 2, "expert_parallel_size": 2},
    "ep2_tp2_dp2_sharded_optimizer": {
        "num_ranks": 4,
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
        "expert_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
        "distributed_optimizer": True,
    },
}
OF_FEWER_AXES = ("tp2", "dp2_sharded_optimizer", "ep2")
"""Layouts whose axes others have too."""
BALANCE = BalanceConfig(aux_loss_coef=0.1, bias_update_rate=0.01)
"""Of a mixture of experts: its biases are no parameters, and must come back all the same."""


def in_gate(names, others):
    """Cases by name, of which these others are in ``make nightly`` only."""
    return [pytest.param(name, marks=pytest.mark.nightly if name in others else ()) for name in names]


def config_of(models, layout, family=""):
    """Of the dense model, or of a mixture of experts if the layout splits experts: GLM-4.5's unless told otherwise."""
    if "expert_parallel_size" not in layout:
        return make_config(models["dense"], layout)
    config = make_config(models[family or "glm4_moe"], layout)
    return config if family in ("qwen3_moe", "gpt_oss") else dataclasses.replace(config, balance=BALANCE)


def start(rank, init_method, config):
    from gtpo_megatron.actor.actor import MegatronActor  # ranks have it already

    return MegatronActor(config, global_rank=rank, init_method=init_method)


def one_step(actor, config, step):
    rows = [row for row in range(8) if row % config.parallel.data_parallel_size == actor.coordinates.data_index]
    actor.score_tokens(RolloutShard.of(make_rollouts(policy_version=step - 1), rows))
    actor.credit_tokens(make_rewards())
    return deterministic(to_scalars(actor.update(step)))


def parameters(actor):
    with whole_weights(actor) as weights:
        return {name: parameter.clone() for name, parameter in weights.items()}


def save(actor, folder):
    """To the end; the checksums of this rank's files."""
    actor.checkpoint.begin(Path(folder), in_background=False)
    checksums = actor.checkpoint.finish()
    # a writer that has told its results is not waited for; it ends all the same, and nothing but it was forked
    children = psutil.Process().children()
    assert len(children) <= 1
    assert not psutil.wait_procs(children, timeout=30)[1]
    return checksums


def draws():
    """The next number of every generator."""
    return torch.rand(2).tolist(), random.random(), float(np.random.rand())  # noqa: NPY002 - what Megatron's users draw from


def unbroken(rank, world_size, init_method, config, folder):
    """Two steps, a checkpoint that is written during the third, the fourth; every rank has random states of its own."""
    actor = start(rank, init_method, config)
    for step in (1, 2):
        one_step(actor, config, step)
    torch.manual_seed(100 + rank)
    random.seed(200 + rank)
    np.random.seed(300 + rank)  # noqa: NPY002
    actor._optimizer_step._skipped_in_a_row = 2
    actor.checkpoint.begin(Path(folder), in_background=True)
    metrics = [one_step(actor, config, 3)]
    checksums = actor.checkpoint.finish()
    metrics.append(one_step(actor, config, 4))
    return metrics, parameters(actor), draws(), checksums


def resumed(rank, world_size, init_method, config, folder, checksums):
    """A fresh process that goes on from the checkpoint."""
    actor = start(rank, init_method, config)
    actor.checkpoint.load(Path(folder), checksums=checksums)
    assert actor._optimizer_step.state_dict() == {"num_updates": 2, "skipped_in_a_row": 2}
    actor._policy_version = 2  # which the push after a resume says
    return [one_step(actor, config, step) for step in (3, 4)], parameters(actor), draws()


def merged(parts):
    return {name: checksum for part in parts for name, checksum in part.items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, tied=False, num_layers=4)
    return folder


@pytest.fixture(scope="module")
def models(model, tmp_path_factory):
    folders = {family: tmp_path_factory.mktemp(family) for family in EXPERT_FAMILIES}
    for family, folder in folders.items():
        make_expert_model(folder, family, num_layers=4)
    return {"dense": model, **folders}


@pytest.mark.parametrize("layout", in_gate(LAYOUTS, OF_FEWER_AXES))
def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(models, tmp_path, layout):
    config = config_of(models, LAYOUTS[layout])
    optimizer = dataclasses.replace(config.optimizer, schedule="cosine", warmup_updates=3)
    config = dataclasses.replace(config, optimizer=optimizer)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    num_ranks = config.parallel.num_ranks
    whole = run_processes(unbroken, num_ranks, config, str(folder), timeout_s=120)
    checksums = merged(checksums for *_, checksums in whole)
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.distcp")}
    assert set(checksums) == set(sizes)
    if config.parallel.data_parallel_size * config.parallel.context_parallel_size > 1:
        assert len(sizes) == num_ranks
        assert max(sizes.values()) < 2 * min(sizes.values()), "replicas share the writing"
    again = run_processes(resumed, num_ranks, config, str(folder), checksums, timeout_s=120)
    for (metrics, weights, drawn, _), (metrics_again, weights_again, drawn_again) in zip(whole, again, strict=True):
        assert metrics == metrics_again
        assert all(torch.equal(weights[name], weights_again[name]) for name in weights)
        assert drawn == drawn_again
    assert len({str(drawn) for _, _, drawn, _ in whole}) == num_ranks


def two_saves(rank, world_size, init_method, config, first, second):
    """A checkpoint before the reference policy is first reset, and one after it."""
    actor = start(rank, init_method, config)
    one_step(actor, config, 1)
    save(actor, first)
    one_step(actor, config, 2)
    return save(actor, second)


def load_only(rank, world_size, init_method, config, folder, checksums):
    start(rank, init_method, config).checkpoint.load(Path(folder), checksums=checksums)


def test_what_a_run_has_since_its_first_save_is_in_its_second(model, tmp_path):
    """Replicas agree once on who writes what; weights of a reference that came later are in no such agreement."""
    config = dataclasses.replace(
        make_config(model, LAYOUTS["dp2_sharded_optimizer"]),
        algorithm=GRPOConfig(reference_kl=ReferenceKLConfig(coef=0.5)),
        reference=ReferenceConfig(reset_every_steps=2),
    )
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    checksums = merged(run_processes(two_saves, 2, config, *map(str, folders), timeout_s=120))
    before, after = (CheckpointReader(folder, verify="none") for folder in folders)
    new = set(after.tensors) - set(before.tensors)
    weights = {name for name in before.tensors if not name.startswith("optimizer.")}
    assert new == {f"reference.{name}" for name in weights}
    for name in weights:
        assert torch.equal(*(after.read([key])[key] for key in (name, f"reference.{name}")))
    run_processes(load_only, 2, config, str(folders[1]), checksums, timeout_s=120)


@pytest.mark.parametrize(
    ("dtype", "sharded"),
    [
        ("float32", False),
        ("bfloat16", False),
        ("bfloat16", True),
        pytest.param("float32", True, marks=pytest.mark.nightly),  # of the same class of Megatron's
    ],
)
def test_a_run_whose_updates_were_all_skipped_can_go_on(model, tmp_path, dtype, sharded):
    """Adam has no moments yet, and has counted to 0."""
    config = make_config(model, {"num_ranks": 1, "distributed_optimizer": sharded})
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype))

    def steps(rank, world_size, init_method, checksums):
        actor = start(rank, init_method, config)
        if checksums is None:
            checksums = save(actor, tmp_path)
        else:
            actor.checkpoint.load(tmp_path, checksums=checksums)
        return checksums, [one_step(actor, config, step) for step in (1, 2)], parameters(actor)

    [(checksums, metrics, weights)] = run_processes(steps, 1, None, timeout_s=60)
    [(_, again, weights_again)] = run_processes(steps, 1, checksums, timeout_s=60)
    assert again == metrics
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)


def first_half(rank, world_size, init_method, config, folder):
    actor = start(rank, init_method, config)
    for step in (1, 2):
        one_step(actor, config, step)
    checksums = save(actor, folder)
    return checksums, [one_step(actor, config, step) for step in (3, 4)]


def second_half(rank, world_size, init_method, config, source, checksums, target):
    """Saves what was loaded again, then goes on."""
    actor = start(rank, init_method, config)
    actor.checkpoint.load(Path(source), checksums=checksums)
    save(actor, target)
    actor._policy_version = 2
    return [one_step(actor, config, step) for step in (3, 4)]


MOVES = {
    "TP2 to PP2": (
        "",
        {"num_ranks": 2, "tensor_parallel_size": 2},
        {"num_ranks": 2, "pipeline_parallel_size": 2},
    ),
    "TP2 SP to PP2 VPP2 DP2, sharded optimizer": (
        "",
        {"num_ranks": 2, "tensor_parallel_size": 2, "sequence_parallel": True, "distributed_optimizer": True},
        {"num_ranks": 4, "pipeline_parallel_size": 2, "virtual_pipeline_size": 2, "distributed_optimizer": True},
    ),
    "EP2 to TP2 ETP1": (
        "glm4_moe",
        {"num_ranks": 2, "expert_parallel_size": 2},
        {"num_ranks": 2, "tensor_parallel_size": 2, "sequence_parallel": True, "expert_parallel_size": 1},
    ),
    "EP2 PP2 to EP4, sharded optimizer": (
        "glm4_moe",
        {"num_ranks": 4, "pipeline_parallel_size": 2, "expert_parallel_size": 2, "distributed_optimizer": True},
        {"num_ranks": 4, "expert_parallel_size": 4, "distributed_optimizer": True},
    ),
    "TP2 ETP2 to EP2 CP2": (
        "glm4_moe",
        {
            "num_ranks": 2,
            "tensor_parallel_size": 2,
            "sequence_parallel": True,
            "expert_parallel_size": 1,
            "expert_tensor_parallel_size": 2,
        },
        {"num_ranks": 2, "context_parallel_size": 2, "expert_parallel_size": 2},
    ),
    "Qwen3-MoE, EP2 to PP2 TP2 ETP2": (
        "qwen3_moe",
        {"num_ranks": 2, "expert_parallel_size": 2},
        {
            "num_ranks": 4,
            "pipeline_parallel_size": 2,
            "tensor_parallel_size": 2,
            "sequence_parallel": True,
            "expert_parallel_size": 1,
            "expert_tensor_parallel_size": 2,
        },
    ),
    "gpt-oss, TP2 EP2 to PP2 VPP2, sharded optimizer": (
        "gpt_oss",
        {
            "num_ranks": 2,
            "tensor_parallel_size": 2,
            "sequence_parallel": True,
            "expert_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
            "distributed_optimizer": True,
        },
        {
            "num_ranks": 2,
            "pipeline_parallel_size": 2,
            "virtual_pipeline_size": 2,
            "expert_parallel_size": 1,
            "distributed_optimizer": True,
        },
    ),
    "Qwen3-MoE, TP2 EP2 ETP2 DP2 to PP2 VPP2 EP2, sharded optimizer": (
        "qwen3_moe",
        {
            "num_ranks": 4,
            "tensor_parallel_size": 2,
            "sequence_parallel": True,
            "expert_parallel_size": 2,
            "expert_tensor_parallel_size": 2,
            "distributed_optimizer": True,
        },
        {
            "num_ranks": 4,
            "pipeline_parallel_size": 2,
            "virtual_pipeline_size": 2,
            "expert_parallel_size": 2,
            "distributed_optimizer": True,
        },
    ),
}
"""Family of experts, layout that saves, layout that goes on."""
LIKE_OTHERS = ("TP2 to PP2", "EP2 to TP2 ETP1", "Qwen3-MoE, EP2 to PP2 TP2 ETP2")
"""Moves along axes, of optimizers and families that others have too."""


@pytest.mark.parametrize("move", in_gate(MOVES, LIKE_OTHERS))
def test_another_layout_goes_on_from_the_same_state(models, tmp_path, move):
    """Weights and Adam's moments to the last bit; the steps after that to rounding."""
    family, source, target = MOVES[move]
    folders = [tmp_path / name for name in ("source", "target")]
    for folder in folders:
        folder.mkdir()
    configs = [config_of(models, layout, family) for layout in (source, target)]
    before = run_processes(first_half, configs[0].parallel.num_ranks, configs[0], str(folders[0]), timeout_s=120)
    after = run_processes(
        second_half,
        configs[1].parallel.num_ranks,
        configs[1],
        str(folders[0]),
        merged(checksums for checksums, _ in before),
        str(folders[1]),
        timeout_s=120,
    )
    one, other = (CheckpointReader(folder, verify="none") for folder in folders)
    assert set(one.tensors) == set(other.tensors)
    for name in one.tensors:
        left, right = (reader.read([name])[name] for reader in (one, other))
        rows = min(len(left), len(right))  # TP 2 pads the vocabulary
        assert rows >= len(left) - 1
        assert first_difference(left[:rows], right[:rows], name) == ""
    for row, row_after in zip(before[-1][1], after[-1], strict=True):
        assert row_after["optimizer/grad_norm"] == pytest.approx(row["optimizer/grad_norm"], rel=1e-4)


def test_bad_checkpoints_are_named(model, tmp_path):
    config = make_config(model, {"num_ranks": 1})
    folder, smaller = tmp_path / "checkpoint", tmp_path / "smaller"
    folder.mkdir()
    make_model(smaller, tied=False, num_layers=2)
    [(checksums, _)] = run_processes(first_half, 1, config, str(folder), timeout_s=120)

    def load(rank, world_size, init_method, config, checksums, message):
        with pytest.raises(CheckpointError, match=message):
            start(rank, init_method, config).checkpoint.load(folder, checksums=checksums)

    run_processes(load, 1, make_config(smaller, {"num_ranks": 1}), checksums, "cannot be loaded: .*shape", timeout_s=60)
    sharded = make_config(model, {"num_ranks": 1, "distributed_optimizer": True})
    run_processes(load, 1, sharded, checksums, "cannot be loaded", timeout_s=60)
    [shard] = folder.glob("*.distcp")
    content = shard.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    shard.write_bytes(flipped)
    message = "is damaged: rank 0: __0_0.distcp has checksum .*go on from an earlier one"
    run_processes(load, 1, config, checksums, message, timeout_s=60)
    shard.write_bytes(content[:100])
    run_processes(load, 1, config, {}, "cannot be loaded", timeout_s=60)
    shard.unlink()
    run_processes(load, 1, config, checksums, "__0_0.distcp cannot be read: No such file", timeout_s=60)


def test_a_sharded_optimizer_that_megatron_would_mix_up_is_refused(tmp_path):
    """Tied embeddings at both ends of a pipeline: Megatron loses its place between buckets where one is padded."""
    make_model(tmp_path / "model", tied=True, num_layers=4)
    (tmp_path / "checkpoint").mkdir()
    layout = {"num_ranks": 2, "pipeline_parallel_size": 2, "distributed_optimizer": True}
    config = make_config(tmp_path / "model", layout)

    def refused(rank, world_size, init_method):
        actor = start(rank, init_method, config)
        message = "would have wrong moments and master weights: rank 1: bucket 0 of 2 has 96 elements of padding"
        with pytest.raises(CheckpointError, match=message):
            save(actor, tmp_path / "checkpoint")

    run_processes(refused, 2)


def test_gradients_that_are_not_finite_are_skipped_then_stop_the_run(model, tmp_path):
    config = make_config(model, LAYOUTS["tp2"])

    def poisoned(rank, world_size, init_method):
        actor = start(rank, init_method, config)
        before = parameters(actor)
        head = actor._update._head

        class Poisoned:
            """The real head, with a gradient that is not a number."""

            model = head.model

            def score(self, hidden, batch):
                scores = head.score(hidden, batch)
                return dataclasses.replace(scores, logprobs=scores.logprobs * torch.tensor(float("nan")))

        actor._update._head = Poisoned()
        for step in (1, 2, 3):
            assert one_step(actor, config, step)["optimizer/skipped_count"] == 1.0
        assert all(torch.equal(before[name], value) for name, value in parameters(actor).items())
        with pytest.raises(NumericsError, match="4 updates in a row were not finite"):
            one_step(actor, config, 4)

    run_processes(poisoned, 2)


@pytest.mark.nightly
def test_export_writes_a_folder_that_transformers_loads(model, tmp_path):
    from transformers import AutoModelForCausalLM

    from gtpo_megatron.weights.conversion import ConversionProgress, megatron_to_hf

    config = make_config(model, LAYOUTS["tp2"])
    (tmp_path / "checkpoint").mkdir()

    def write(rank, world_size, init_method):
        save(start(rank, init_method, config), tmp_path / "checkpoint")

    run_processes(write, 2)
    source, target = tmp_path / "checkpoint", tmp_path / "hf"
    megatron_to_hf(
        source, Path(config.model.path), target, progress=ConversionProgress(), verify="none"
    )  # ranks write no manifest
    original, exported = (AutoModelForCausalLM.from_pretrained(path) for path in (model, tmp_path / "hf"))
    for name, tensor in original.state_dict().items():
        assert torch.equal(tensor, exported.state_dict()[name]), name
