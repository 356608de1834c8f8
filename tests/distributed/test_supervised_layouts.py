"""One update of supervised fine-tuning equals transformers with autograd, whatever the layout and the cuts."""

import copy
import dataclasses
import itertools

import pytest
import torch

from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.data.packing import num_places
from gtpo_megatron.observability.metrics import Sum, merge, to_scalars
from tests.dist_utils import run_processes
from tests.distributed.family_models import FAMILIES, make_family_model
from tests.distributed.model_file import read_tensors, write_slices
from tests.distributed.one_update import DEALINGS, compare_gradients
from tests.distributed.test_actor_layouts import LAYOUTS
from tests.distributed.tiny_world import dense_scores, make_config, make_model, make_rollouts, named_weights, own_tokens
from tests.reference.supervised import mean_nll

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of every optional kernel it lacks
]

BEFORE_A_COMMIT = ("one", "tp2_sp", "pp2_vpp2_cp2", "dp2")
"""Every axis once; every other layout is in ``make nightly``."""


def one_fit(rank, world_size, init_method, config, path, dealing, rollouts):
    """The loss before the update, the update, and what is left of it."""
    from gtpo_megatron.actor import forward_backward
    from gtpo_megatron.actor.actor import MegatronActor
    from gtpo_megatron.actor.model.policy_model import parameters_by_name

    forward_backward.MIN_PREFIX_TOKENS = 1
    actor = MegatronActor(config, global_rank=rank, init_method=init_method)
    mine = rollouts.select(DEALINGS[dealing, config.parallel.data_parallel_size][actor.coordinates.data_index])
    before = actor.heldout_loss(mine)
    metrics = before | actor.fit(mine, num_tokens=int(rollouts.own_lengths.sum()), step=1)
    write_slices(path, actor, config)
    trained = {name: one for name, one in parameters_by_name(actor._chunks).items() if one.requires_grad}
    write_slices(f"{path}_gradients", actor, config, {name: one.main_grad for name, one in trained.items()})
    packed = actor._micro_batching.cut(mine, range(mine.num_responses))
    metrics["sft/shared_count"] = Sum(sum(num_places(prefix) for micro in packed for prefix in micro.prefixes))
    reports = actor.coordinates.reports
    actor.close()
    return metrics if reports else {}


def dense_fit(model, config, rollouts):
    """By transformers, autograd and torch's AdamW: loss, clipped gradients, their norm before, new weights."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.optimizer.learning_rate, eps=config.optimizer.adam_eps, weight_decay=0
    )
    logprobs, _ = dense_scores(model, rollouts)
    loss = -logprobs.sum() / rollouts.loss_mask.sum()
    model.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad)
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    optimizer.step()
    assert float(loss) == pytest.approx(mean_nll(logprobs.tolist(), rollouts.loss_mask.tolist()), rel=1e-6)
    return float(loss), float(norm), gradients, {name: one.clone() for name, one in named_weights(model).items()}


def compare(tmp_path, model, config, *, rollouts=None, dealing=None):
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, adam_eps=1e-4))
    rollouts = rollouts or make_rollouts(loss_mask=own_tokens())
    loss, norm, gradients, weights = dense_fit(copy.deepcopy(model), config, rollouts)
    dealing = dealing or ("one" if config.parallel.data_parallel_size == 1 else "split")
    path = str(tmp_path / "buffer")
    ranks = run_processes(one_fit, config.parallel.num_ranks, config, path, dealing, rollouts, timeout_s=120)
    scalars = to_scalars(merge(ranks))
    assert scalars["sft/loss"] == pytest.approx(loss, rel=1e-5)
    assert scalars["sft/heldout_loss"] == pytest.approx(loss, rel=1e-5)
    assert scalars["optimizer/grad_norm"] == pytest.approx(norm, rel=1e-5)
    if not config.parallel.distributed_optimizer:  # which leaves on each rank the sums of its own part only
        compare_gradients(read_tensors(f"{path}_gradients", config.model.path), gradients)
    for name, tensor in read_tensors(path, config.model.path).items():
        torch.testing.assert_close(
            tensor, weights[name], rtol=0, atol=5e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    return scalars


@pytest.fixture(scope="module")
def folder_and_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, make_model(folder, tied=False, num_layers=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name in BEFORE_A_COMMIT else pytest.mark.nightly) for name in LAYOUTS],
)
def test_a_mean_over_tokens_on_every_layout(folder_and_model, tmp_path, layout):
    folder, model = folder_and_model
    compare(tmp_path, model, make_config(folder, LAYOUTS[layout]))


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_tokens", [1, pytest.param(1000, marks=pytest.mark.nightly)])
def test_the_cut_into_micro_batches_changes_nothing(folder_and_model, tmp_path, micro_batch_tokens):
    """Conversations of one trained token weigh what their token weighs, in whatever micro-batch."""
    folder, model = folder_and_model
    compare(tmp_path, model, make_config(folder, LAYOUTS["one"], micro_batch_tokens=micro_batch_tokens))


@pytest.mark.slow
def test_conversations_with_one_system_prompt(folder_and_model, tmp_path):
    """Which is run once."""
    folder, model = folder_and_model
    rollouts = make_rollouts(loss_mask=own_tokens())
    prompts = rollouts.prompt_ids.clone()
    prompts[:, :3] = prompts[0, :3]
    rollouts = dataclasses.replace(rollouts, prompt_ids=prompts)
    config = make_config(folder, LAYOUTS["one"], micro_batch_tokens=1000)
    found = compare(tmp_path, model, config, rollouts=rollouts)
    lengths = rollouts.prompt_lengths.tolist()
    assert found["sft/shared_count"] >= sum(min(3, one, next_) for one, next_ in itertools.pairwise(lengths))


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["dp2", "tp2_dp2", "pp2_vpp2_dp2_sharded_optimizer"])
def test_a_replica_without_conversations(folder_and_model, tmp_path, layout):
    folder, model = folder_and_model
    compare(tmp_path, model, make_config(folder, LAYOUTS[layout]), dealing="uneven")


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "olmo2", "glm4"])
@pytest.mark.parametrize("layout", ["tp2_sp", "dp2"])
def test_other_families(tmp_path, family, layout):
    model = make_family_model(tmp_path / "model", FAMILIES[family])
    compare(tmp_path, model, make_config(tmp_path / "model", LAYOUTS[layout]))


def fit_adapters(rank, world_size, init_method, config, rollouts):
    """Two steps; the loss before each, and after."""
    from gtpo_megatron.actor.actor import MegatronActor

    actor = MegatronActor(config, global_rank=rank, init_method=init_method)
    num_replicas = config.parallel.data_parallel_size
    rows = DEALINGS["one" if num_replicas == 1 else "split", num_replicas]
    mine, num_tokens = rollouts.select(rows[actor.coordinates.data_index]), int(rollouts.own_lengths.sum())
    found = [actor.fit(mine, num_tokens=num_tokens, step=step) for step in (1, 2)] + [actor.heldout_loss(mine)]
    reports = actor.coordinates.reports
    actor.close()
    return found if reports else [{}, {}, {}]


@pytest.mark.slow
def test_adapters_learn_alike_on_every_layout(folder_and_model, tmp_path):
    folder, _ = folder_and_model
    rollouts, curves = make_rollouts(loss_mask=own_tokens()), []
    for layout in ("one", "tp2_sp", "dp2"):
        config = make_config(folder, LAYOUTS[layout], adapter=AdapterConfig(rank=4, alpha=8.0))
        config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, adam_eps=1e-4))
        ranks = run_processes(fit_adapters, config.parallel.num_ranks, config, rollouts, timeout_s=120)
        first, second, after = (to_scalars(merge(found)) for found in zip(*ranks, strict=True))
        curves.append([first["sft/loss"], second["sft/loss"], after["sft/heldout_loss"]])
    assert curves[0][2] < curves[0][1] < curves[0][0]
    for other in curves[1:]:
        assert other == pytest.approx(curves[0], rel=1e-4)
