"""What saves memory changes no number: recomputation, bfloat16 with float32 master weights and gradients."""

import dataclasses

import pytest
import torch

from gtpo_megatron.batch import RolloutShard
from gtpo_megatron.observability.metrics import deterministic, to_scalars
from tests.dist_utils import run_processes
from tests.distributed.tiny_world import make_config, make_model, make_rewards, make_rollouts

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of every optional kernel it lacks
]


def start(rank, init_method, config):
    from gtpo_megatron.actor.actor import MegatronActor  # ranks have it already

    return MegatronActor(config, global_rank=rank, init_method=init_method)


def one_step(actor, step=1):
    scores = actor.score_tokens(RolloutShard.of(make_rollouts(policy_version=step - 1), range(8)))
    actor.credit_tokens(make_rewards())
    return deterministic(to_scalars(scores | actor.update(step)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, tied=False, num_layers=4)
    return folder


LAYOUTS = {
    "tp2_sp_cp2": {
        "num_ranks": 4,
        "tensor_parallel_size": 2,
        "context_parallel_size": 2,
        "sequence_parallel": True,
    },
    "pp2_vpp2": {"num_ranks": 2, "pipeline_parallel_size": 2, "virtual_pipeline_size": 2},
}


def recomputing(rank, world_size, init_method, config):
    """One step with each kind of recomputation: metrics and weights."""
    found = {}
    for kind in ("none", "selective", "full"):
        changed = dataclasses.replace(config, model=dataclasses.replace(config.model, recompute=kind))
        actor = start(rank, f"{init_method}_{kind}", changed)
        found[kind] = one_step(actor), {name: weight.clone() for name, weight in actor._weights().items()}
        actor.close()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputing_activations_changes_nothing(folder, layout):
    config = make_config(folder, LAYOUTS[layout])
    for found in run_processes(recomputing, config.parallel.num_ranks, config, timeout_s=120):
        metrics, weights = found["none"]
        for kind in ("selective", "full"):
            assert found[kind][0] == metrics
            assert all(torch.equal(weights[name], found[kind][1][name]) for name in weights)


def saved_bytes(rank, world_size, init_method, config):
    """Bytes of the distinct tensors that autograd keeps of one forward pass, weights left out."""
    from gtpo_megatron.actor.forward_backward import run_micro_batches
    from gtpo_megatron.data.packing import micro_batches

    found = {}
    for kind in ("none", "selective", "full"):
        changed = dataclasses.replace(config, model=dataclasses.replace(config.model, recompute=kind))
        actor = start(rank, f"{init_method}_{kind}", changed)
        weights = {parameter.untyped_storage().data_ptr() for parameter in actor._chunks[0].parameters()}
        kept, total = [], []

        def keep(tensor, kept=kept):
            kept.append(tensor)  # alive, so that no two have one address
            return tensor

        def finish(hidden, batch, kept=kept, total=total, weights=weights):
            storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
            total.append(sum(size for pointer, size in storages.items() if pointer not in weights))
            return hidden.sum() * 0.0, None

        (batch,) = micro_batches(make_rollouts(), range(8), budget_tokens=1000)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            run_micro_batches(actor._model, [batch], finish, forward_only=False)
        found[kind] = total[0] / len(batch.input_ids)
        actor.close()
    return found


def test_recomputing_keeps_less(folder):
    (found,) = run_processes(saved_bytes, 1, make_config(folder, {"num_ranks": 1}))
    hidden = 32 * 4  # bytes of a token's hidden state; four layers, and the final norm's input and deviation
    assert found["full"] < 7 * hidden
    assert found["full"] < 0.2 * found["none"]
    # attention keeps queries, keys and values either way, and without recomputation what came out of it
    assert found["full"] < found["selective"] < found["none"]


def bfloat16_step(rank, world_size, init_method, config):
    """A step in bfloat16: metrics, the weights before and after, Megatron's master weights and gradients."""
    actor = start(rank, init_method, config)
    before = {name: weight.clone() for name, weight in actor._weights().items()}
    metrics = one_step(actor)
    gradients = [parameter.main_grad.clone() for chunk in actor._chunks for parameter in chunk.parameters()]
    masters = [p.clone() for group in actor._optimizer.param_groups for p in group["params"]]
    return metrics, before, {name: weight.clone() for name, weight in actor._weights().items()}, masters, gradients


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_bfloat16_keeps_master_weights_and_gradients_in_float32(folder, distributed_optimizer):
    exact = make_config(folder, {"num_ranks": 2, "distributed_optimizer": distributed_optimizer}, micro_batch_tokens=17)
    # far below what a bfloat16 weight can change by: only master weights add it up
    slow = dataclasses.replace(exact, optimizer=dataclasses.replace(exact.optimizer, learning_rate=1e-6))
    config = dataclasses.replace(slow, model=dataclasses.replace(slow.model, dtype="bfloat16"))
    (reference, *_), _ = run_processes(bfloat16_step, 2, slow, timeout_s=120)
    for metrics, before, after, masters, gradients in run_processes(bfloat16_step, 2, config, timeout_s=120):
        assert metrics["policy/entropy_nats"] == pytest.approx(reference["policy/entropy_nats"], rel=2e-2)
        assert metrics["optimizer/grad_norm"] == pytest.approx(reference["optimizer/grad_norm"], rel=5e-2)
        assert all(weight.dtype == torch.bfloat16 for weight in after.values())
        unchanged = sum(int((before[name] == after[name]).sum()) for name in before)
        assert unchanged > 0.98 * sum(weight.numel() for weight in before.values())
        for tensors in (masters, gradients):
            assert {tensor.dtype for tensor in tensors} == {torch.float32}
            finer = sum(int((tensor != tensor.bfloat16()).sum()) for tensor in tensors)
            assert finer > 0.5 * sum(tensor.numel() for tensor in tensors)
