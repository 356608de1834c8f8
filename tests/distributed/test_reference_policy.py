"""A reference policy in the ranks of the live one: its log-probs, and that the live one does not notice."""

import copy
import dataclasses

import pytest
import torch

from gtpo_megatron.batch import RolloutShard
from gtpo_megatron.config.algorithm import (
    DrGRPOConfig,
    GRPOConfig,
    GRPOSConfig,
    GTPOConfig,
    ReferenceConfig,
    ReferenceKLConfig,
    REINFORCEPlusPlusConfig,
    RLOOConfig,
)
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.observability.metrics import merge, to_scalars
from tests.dist_utils import run_processes
from tests.distributed.expert_models import make_expert_model
from tests.distributed.one_update import DEALINGS, compare
from tests.distributed.tiny_world import dense_scores, make_config, make_model, make_rewards, make_rollouts, own_tokens

pytestmark = [
    pytest.mark.slow,
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of every optional kernel it lacks
]

LAYOUTS = {
    "one": {"num_ranks": 1},
    "tp2_sp_cp2": {
        "num_ranks": 4,
        "tensor_parallel_size": 2,
        "context_parallel_size": 2,
        "sequence_parallel": True,
    },
    "pp2_vpp2_dp2_sharded_optimizer": {
        "num_ranks": 4,
        "pipeline_parallel_size": 2,
        "virtual_pipeline_size": 2,
        "distributed_optimizer": True,
    },
    "pp2_tp2": {"num_ranks": 4, "pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "dp2_sharded_optimizer": {"num_ranks": 2, "distributed_optimizer": True},
    "tp2": {"num_ranks": 2, "tensor_parallel_size": 2},
}
EXPERT_LAYOUTS = {
    "ep2_tp2": {
        "num_ranks": 2,
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
        "expert_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
    "ep2_pp2_sharded_optimizer": {
        "num_ranks": 4,
        "pipeline_parallel_size": 2,
        "expert_parallel_size": 2,
        "distributed_optimizer": True,
    },
}
QUICK = ("one", "dp2_sharded_optimizer")
K3_IN_LOSS = GRPOConfig(reference_kl=ReferenceKLConfig(coef=0.5))


def other(model, folder):
    """A policy of the same shape, not far away."""
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(23)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    moved.save_pretrained(folder)
    return moved


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Per tying: the policy's folder and model, those of its reference."""
    found = {}
    for tied in (False, True):
        folder, reference = tmp_path_factory.mktemp("policy"), tmp_path_factory.mktemp("reference")
        model = make_model(folder, tied=tied, num_layers=4)
        found[tied] = folder, model, reference, other(model, reference)
    return found


def with_reference(folder, reference, layout, algorithm=K3_IN_LOSS, **fields):
    config = make_config(folder, layout, algorithm=algorithm)
    return dataclasses.replace(config, reference=ReferenceConfig(path=str(reference), **fields))


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.nightly) for name in LAYOUTS]
)
def test_scores_and_update_equal_those_of_two_models(made, tmp_path, layout):
    folder, model, reference, ref_model = made[layout in ("pp2_tp2", "one")]
    scalars = compare(
        tmp_path, model, with_reference(folder, reference, LAYOUTS[layout]), ref_model=ref_model, dealing=None
    )
    batch = make_rollouts(loss_mask=own_tokens())
    logprobs, ref_logprobs = (dense_scores(one, batch)[0].detach().double() for one in (model, ref_model))
    difference = (logprobs - ref_logprobs)[batch.loss_mask]
    k3 = torch.exp(-difference) - 1 + difference
    assert scalars["policy/kl_ref_nats"] == pytest.approx(float(k3.mean()), rel=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "algorithm",
    [
        GTPOConfig(reference_kl=ReferenceKLConfig(coef=0.5, estimator="k2")),
        GTPOConfig(reference_kl=ReferenceKLConfig(coef=0.5, place="reward", estimator="k1"), one_sided_groups="keep"),
        GRPOSConfig(reference_kl=ReferenceKLConfig(coef=0.5, estimator="k3", gradient="unbiased")),
        GRPOSConfig(reference_kl=ReferenceKLConfig(coef=0.5, place="reward", estimator="k3")),
        DrGRPOConfig(norm_tokens=12, reference_kl=ReferenceKLConfig(coef=0.5, estimator="k1")),
        RLOOConfig(reference_kl=ReferenceKLConfig(coef=0.5, place="reward", estimator="k1")),
        REINFORCEPlusPlusConfig(reference_kl=ReferenceKLConfig(coef=0.5, estimator="k1", gradient="unbiased")),
    ],
)
def test_every_place_and_gradient(made, tmp_path, algorithm):
    """Over two replicas, which share the normalisation of rewards."""
    folder, model, reference, ref_model = made[False]
    config = with_reference(folder, reference, LAYOUTS["dp2_sharded_optimizer"], algorithm)
    compare(tmp_path, model, config, ref_model=ref_model)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_of_a_mixture_of_experts(tmp_path, layout, family):
    folder, reference = tmp_path / "policy", tmp_path / "reference"
    model = make_expert_model(folder, family)
    ref_model = other(model, reference)
    config = with_reference(folder, reference, EXPERT_LAYOUTS[layout])
    compare(tmp_path, model, config, ref_model=ref_model)


@pytest.mark.nightly
def test_routing_replay_stays_with_the_live_policy(tmp_path):
    """The reference chooses its own experts, and the update replays the live policy's."""
    folder, reference = tmp_path / "policy", tmp_path / "reference"
    model = make_expert_model(folder, "qwen3_moe")
    ref_model = other(model, reference)
    config = with_reference(folder, reference, EXPERT_LAYOUTS["ep2_tp2"])
    config = dataclasses.replace(config, update=dataclasses.replace(config.update, routing_replay="score"))
    compare(tmp_path, model, config, ref_model=ref_model)


@pytest.mark.nightly
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_with_recomputation(made, tmp_path, recompute):
    folder, model, reference, ref_model = made[False]
    config = with_reference(folder, reference, LAYOUTS["tp2"])
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, recompute=recompute))
    compare(tmp_path, model, config, ref_model=ref_model)


def state_of(actor):
    """Every number that an update reads or writes, by name."""
    found = {f"weights.{name}": tensor.clone() for name, tensor in actor._weights().items()}
    for number, chunk in enumerate(actor._model):
        for part in (*chunk.buffers, *chunk.expert_parallel_buffers):
            found[f"gradients.{number}.{len(found)}"] = part.grad_data.clone()
    for part in getattr(actor._optimizer, "chained_optimizers", [actor._optimizer]):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                found[f"master.{len(found)}"] = parameter.detach().clone()
                for key, value in part.optimizer.state[parameter].items():
                    found[f"{key}.{len(found)}"] = torch.as_tensor(value).clone()
    return found


def fail_in_the_reference(actor, reference):
    with actor._reference.in_place():
        assert all(torch.equal(tensor, reference[name]) for name, tensor in actor._weights().items())
        raise RuntimeError("in the middle")


def a_step_then_scores(rank, world_size, init_method, config):
    """State before and after a scoring pass with its exchange of policies, and where the weights lie."""
    from gtpo_megatron.actor.actor import MegatronActor  # ranks have it already

    actor = MegatronActor(config, global_rank=rank, init_method=init_method)
    replicas = config.parallel.data_parallel_size
    rows = DEALINGS["one" if replicas == 1 else "split", replicas][actor.coordinates.data_index]
    actor.score_tokens(RolloutShard.of(make_rollouts(), rows))
    actor.credit_tokens(make_rewards())
    actor.update(1)
    before, places = state_of(actor), [tensor.data_ptr() for tensor in actor._weights().values()]
    reference = {name: value.clone() for name, value in actor._reference.values().items()}
    actor.score_tokens(RolloutShard.of(make_rollouts(policy_version=1), rows))
    assert [tensor.data_ptr() for tensor in actor._weights().values()] == places
    assert all(torch.equal(value, reference[name]) for name, value in actor._reference.values().items())
    with pytest.raises(RuntimeError, match="in the middle"):
        fail_in_the_reference(actor, reference)
    return before, state_of(actor)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "layout",
    ["dp2_sharded_optimizer", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("tp2", "pp2_tp2"))],
)
def test_the_live_policy_is_bit_equal_after_the_exchange(made, layout, dtype):
    """Weights, master weights, moments and gradient buffers; an error in the pass changes nothing of it."""
    folder, _, reference, _ = made[False]
    config = with_reference(folder, reference, LAYOUTS[layout])
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype))
    for before, after in run_processes(a_step_then_scores, config.parallel.num_ranks, config, timeout_s=120):
        assert before.keys() == after.keys()
        assert not [name for name in before if not torch.equal(before[name], after[name])]


def kl_of_steps(rank, world_size, init_method, config, num_steps):
    from gtpo_megatron.actor.actor import MegatronActor

    actor = MegatronActor(config, global_rank=rank, init_method=init_method)
    found = []
    for step in range(1, num_steps + 1):
        scores = actor.score_tokens(RolloutShard.of(make_rollouts(policy_version=step - 1), range(8)))
        actor.credit_tokens(make_rewards())
        actor.update(step)
        found.append(to_scalars(merge([scores]))["policy/kl_ref_nats"])
    actor.close()
    return found


def test_the_first_policy_is_the_reference_until_it_is_reset(made):
    """A folder is not needed; a policy has no distance from itself, before the first update and after a reset."""
    folder, *_ = made[False]
    config = make_config(folder, LAYOUTS["one"], algorithm=K3_IN_LOSS)
    config = dataclasses.replace(config, reference=ReferenceConfig(reset_every_steps=2))
    [found] = run_processes(kl_of_steps, 1, config, 4, timeout_s=120)
    assert [value == 0 for value in found] == [True, False, True, False]


def test_without_a_coefficient_it_is_only_measured(made):
    """The same updates as without a reference."""
    folder, *_ = made[False]
    plain = make_config(folder, LAYOUTS["one"])
    measured = dataclasses.replace(plain, reference=ReferenceConfig(measured=True))

    def weights(rank, world_size, init_method, config):
        from gtpo_megatron.actor.actor import MegatronActor

        actor = MegatronActor(config, global_rank=rank, init_method=init_method)
        scores = actor.score_tokens(RolloutShard.of(make_rollouts(), range(8)))
        actor.credit_tokens(make_rewards())
        actor.update(1)
        return {name: tensor.clone() for name, tensor in actor._weights().items()}, scores

    ([(one, scores)], [(two, more_scores)]) = (run_processes(weights, 1, config) for config in (plain, measured))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert "policy/kl_ref_nats" not in scores
    assert more_scores["policy/kl_ref_nats"].total == 0


def test_the_samplers_scores_are_compared_with_the_reference_too(made):
    folder, _, reference, ref_model = made[False]
    config = with_reference(folder, reference, LAYOUTS["one"])
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, entropy_source="rollout"))
    rollouts = make_rollouts(token_entropy=torch.ones(8, 12), rollout_logprobs=-torch.ones(8, 12))

    def scored(rank, world_size, init_method):
        from gtpo_megatron.actor.actor import MegatronActor

        actor = MegatronActor(config, global_rank=rank, init_method=init_method)
        actor.use_sampler_scores(RolloutShard.of(rollouts, range(8)))
        return actor.batch.ref_logprobs

    [found] = run_processes(scored, 1)
    torch.testing.assert_close(found, dense_scores(ref_model, rollouts)[0].detach(), rtol=1e-4, atol=2e-5)


def test_a_reference_of_another_shape_is_one_line(made, tmp_path):
    folder, *_ = made[False]
    make_model(tmp_path, tied=False, num_layers=2)
    config = with_reference(folder, tmp_path, LAYOUTS["one"])

    def refused(rank, world_size, init_method):
        from gtpo_megatron.actor.actor import MegatronActor

        with pytest.raises(ConfigError, match="num_layers is 2, that of model.path is 4; give the folder"):
            MegatronActor(config, global_rank=rank, init_method=init_method)

    run_processes(refused, 1)
