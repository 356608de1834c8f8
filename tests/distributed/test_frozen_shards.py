"""Frozen weights that replicas share change no bit: scores, gradients, new adapters, pushes, checkpoints."""

import dataclasses
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from gtpo_megatron.batch import RolloutShard
from gtpo_megatron.config.adapter import ALL_LINEAR, AdapterConfig
from gtpo_megatron.observability.metrics import deterministic, to_scalars
from tests.dist_utils import run_processes
from tests.distributed.one_update import DEALINGS
from tests.distributed.tiny_world import make_config, make_model, make_rewards, make_rollouts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of every optional kernel it lacks
]

LAYOUTS = {
    "dp2": {"num_ranks": 2},
}


def config_of(folder, layout, **adapter):
    config = make_config(folder, layout, micro_batch_tokens=17)
    return dataclasses.replace(config, adapter=AdapterConfig(**{"rank": 4, "alpha": 8.0} | adapter))


@contextmanager
def whole_weights(actor):
    """A rank's merged weights, those that replicas share gathered."""
    frozen, weights = actor._trained.frozen, actor._weights()
    for _ in [0] if frozen is None else frozen.in_turns({0: list(weights)}):
        yield weights


def two_steps(rank, world_size, init_method, config, dealing):
    """All that a rank computes in two steps."""
    from gtpo_megatron.actor.actor import MegatronActor  # ranks have it already

    actor = MegatronActor(config, global_rank=rank, init_method=init_method)
    rows = DEALINGS[dealing, config.parallel.data_parallel_size][actor.coordinates.data_index]
    found = []
    for step in (1, 2):
        scored = actor.score_tokens(RolloutShard.of(make_rollouts(policy_version=step - 1), rows))
        scores = getattr(actor.batch, "old_logprobs", None), getattr(actor.batch, "token_entropy", None)
        actor.credit_tokens(make_rewards())
        metrics = deterministic(to_scalars(scored | actor.update(step)))
        parts = actor._trained.adapters.parts
        gradients = [one.main_grad.clone() for part in parts for one in part.tensors().values()]
        found.append((metrics, scores, gradients))
    with whole_weights(actor) as weights:
        tensors = {name: weights[name].clone() for name in weights}
    actor.close()
    return found, tensors


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}
    for tied in (False, True):
        made[tied] = tmp_path_factory.mktemp("model")
        make_model(made[tied], tied=tied, num_layers=4)
    return made


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_bit_is_the_same(models, layout):
    config = config_of(models[False], LAYOUTS[layout])
    dealing = "split"
    found = []
    for shard in (False, True):
        one = dataclasses.replace(config, adapter=dataclasses.replace(config.adapter, shard_frozen=shard))
        found.append(run_processes(two_steps, one.parallel.num_ranks, one, dealing, timeout_s=120))
    for plain, shared in zip(*found, strict=True):
        assert same(plain, shared)
