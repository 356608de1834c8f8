"""A rank that was killed and came back goes on to the last bit; a bad gradient never reaches the weights."""

import dataclasses
from pathlib import Path

import pytest
import torch

from gtpo_megatron.errors import CheckpointError, NumericsError
from gtpo_megatron.observability.metrics import deterministic, to_scalars
from tests.dist_utils import run_processes
from tests.distributed.tiny_world import make_config, make_model, make_rewards, make_rollouts

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("megatron"),
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
}


def start(rank, init_method, config):
    from gtpo_megatron.actor.actor import MegatronActor  # imported by the parent already

    return MegatronActor(config, global_rank=rank, init_method=init_method)


def one_step(actor, config, step):
    rows = [row for row in range(8) if row % config.parallel.data_parallel_size == actor.place.data_index]
    scored, _ = actor.score_tokens(make_rollouts(policy_version=step - 1), rows)
    batch, _ = actor.assign_credit(scored, make_rewards())
    return deterministic(to_scalars(actor.update(batch, step)))


def parameters(actor):
    return {name: parameter.clone() for name, parameter in actor._weights().items()}


def unbroken(rank, world_size, init_method, config, folder):
    """Two steps, a checkpoint, two more."""
    actor = start(rank, init_method, config)
    for step in (1, 2):
        one_step(actor, config, step)
    actor.begin_save(folder, False)
    checksums = actor.finish_save()
    metrics = [one_step(actor, config, step) for step in (3, 4)]
    return metrics, parameters(actor), checksums


def resumed(rank, world_size, init_method, config, folder):
    """A fresh process that goes on from the checkpoint."""
    actor = start(rank, init_method, config)
    actor.load(folder)
    actor._policy_version = 2  # which the push after a resume says
    return [one_step(actor, config, step) for step in (3, 4)], parameters(actor)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, tied=False, num_layers=4)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(model, tmp_path, layout):
    config = make_config(model, LAYOUTS[layout])
    optimizer = dataclasses.replace(config.optimizer, schedule="cosine", warmup_updates=3)
    config = dataclasses.replace(config, optimizer=optimizer)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    num_ranks = config.parallel.num_ranks
    whole = run_processes(unbroken, num_ranks, config, str(folder), timeout_s=120)
    again = run_processes(resumed, num_ranks, config, str(folder), timeout_s=120)
    for (metrics, weights), (metrics_again, weights_again) in zip(whole, again, strict=True):
        assert metrics == metrics_again
        assert all(torch.equal(weights[name], weights_again[name]) for name in weights)


def test_a_checkpoint_that_is_cut_or_of_another_model_is_named(model, tmp_path):
    config = make_config(model, {"num_ranks": 1})
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    run_processes(unbroken, 1, config, str(folder), timeout_s=120)
    for shard in folder.glob("*.distcp"):
        shard.write_bytes(shard.read_bytes()[:100])

    def load(rank, world_size, init_method):
        with pytest.raises(CheckpointError, match="cannot be loaded"):
            start(rank, init_method, config).load(str(folder))

    run_processes(load, 1)


def test_a_disk_that_refuses_is_named(model, tmp_path):
    config = make_config(model, {"num_ranks": 1})

    def save(rank, world_size, init_method):
        with pytest.raises(CheckpointError, match="could not be written"):
            start(rank, init_method, config).save(str(tmp_path / "absent" / "folder"))

    run_processes(save, 1)


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


def test_export_writes_a_folder_that_transformers_loads(model, tmp_path):
    from transformers import AutoModelForCausalLM

    from gtpo_megatron.weights.conversion import Unseen, megatron_to_hf

    config = make_config(model, LAYOUTS["tp2"])
    (tmp_path / "checkpoint").mkdir()

    def save(rank, world_size, init_method):
        start(rank, init_method, config).save(str(tmp_path / "checkpoint"))

    run_processes(save, 2)
    megatron_to_hf(tmp_path / "checkpoint", Path(config.model.path), tmp_path / "hf", progress=Unseen())
    original, exported = (AutoModelForCausalLM.from_pretrained(path) for path in (model, tmp_path / "hf"))
    for name, tensor in original.state_dict().items():
        assert torch.equal(tensor, exported.state_dict()[name]), name
