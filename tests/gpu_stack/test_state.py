"""What a rank with Transformer Engine's Adam keeps comes back to the last bit: from a checkpoint, and from the host."""

import dataclasses

import pytest
import torch

from gtpo_megatron.actor.host_memory import optimizer_tensors
from tests.dist_utils import run_processes
from tests.distributed.test_actor_checkpoint import merged, one_step, parameters, resumed, start, unbroken
from tests.gpu_stack.models import make_model
from tests.gpu_stack.te_updates import te_config

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron and torch's checkpoint warn of deprecations of their own

LAYOUTS = {
    "one": {"num_ranks": 1},
    "dp2": {"num_ranks": 2},
    "tp2_sp": {"num_ranks": 2, "tensor_parallel_size": 2, "sequence_parallel": True},
    "pp2_vpp2": {"num_ranks": 2, "pipeline_parallel_size": 2, "virtual_pipeline_size": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, "qwen2")
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_equals_an_unbroken_one(folder, tmp_path, layout):
    """By Megatron's own loading of the optimizer, which a CPU's actor replaces."""
    config = te_config(folder, LAYOUTS[layout])
    optimizer = dataclasses.replace(config.optimizer, schedule="cosine", warmup_updates=3)
    config = dataclasses.replace(config, optimizer=optimizer)
    place = tmp_path / "checkpoint"
    place.mkdir()
    num_ranks = config.parallel.num_ranks
    whole = run_processes(unbroken, num_ranks, config, str(place), timeout_s=150)
    checksums = merged(checksums for *_, checksums in whole)
    again = run_processes(resumed, num_ranks, config, str(place), checksums, timeout_s=150)
    for (metrics, weights, drawn, _), (metrics_again, weights_again, drawn_again) in zip(whole, again, strict=True):
        assert metrics == metrics_again
        assert drawn == drawn_again
        assert all(torch.equal(weights[name], weights_again[name]) for name in weights)


def two_steps(rank, world_size, init_method, config, shares_gpu):
    """With ``shares_gpu`` gradients and optimizer are on the host between them, as while engines sample."""
    actor = start(rank, init_method, config)
    metrics, parked = [one_step(actor, config, 1)], 0
    if shares_gpu:
        kept = optimizer_tensors(actor._optimizer, (p for chunk in actor._chunks for p in chunk.parameters()))
        before = [tensor.clone() for tensor in kept]
        actor.offload()
        parked = sum(tensor.nbytes for tensor in before)
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in kept)
        actor.onload()
        assert all(torch.equal(tensor, copy) for tensor, copy in zip(kept, before, strict=True))
    metrics.append(one_step(actor, config, 2))
    found = metrics, parameters(actor), parked, sum(p.numel() for p in parameters(actor).values())
    actor.close()
    return found


@pytest.mark.parametrize("layout", ["one", "dp2"])
def test_a_turn_of_the_engines_changes_nothing(folder, layout):
    config = te_config(folder, LAYOUTS[layout])
    num_ranks = config.parallel.num_ranks
    alone = run_processes(two_steps, num_ranks, config, False, timeout_s=150)
    shared = run_processes(two_steps, num_ranks, config, True, timeout_s=150)
    for (metrics, weights, _, num), (metrics_again, weights_again, parked, _) in zip(alone, shared, strict=True):
        assert metrics == metrics_again
        assert all(torch.equal(weights[name], weights_again[name]) for name in weights)
        # two moments and the master weights, in float32, of this rank's share
        assert parked == pytest.approx(3 * 4 * num / num_ranks, rel=0.02)
