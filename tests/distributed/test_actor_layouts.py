"""One update of real Megatron ranks equals transformers with autograd, whatever the layout and the cuts."""

import dataclasses
import pickle

import pytest
import torch

from gtpo_megatron.batch import RolloutShard, mask_of_lengths
from gtpo_megatron.config.algorithm import GRPOConfig, GRPOSConfig, GTPOConfig
from gtpo_megatron.config.environment import EnvironmentConfig
from gtpo_megatron.config.reward import RewardConfig
from gtpo_megatron.data.sharding import shard_by_updates, updates_of_step
from gtpo_megatron.errors import DataError, StageOrderError
from gtpo_megatron.observability.metrics import merge, to_scalars
from tests.dist_utils import run_processes
from tests.distributed.family_models import FAMILIES, make_family_model
from tests.distributed.model_file import read_tensors, write_slices
from tests.distributed.one_update import compare
from tests.distributed.tiny_world import VOCAB, make_config, make_model, make_rewards, make_rollouts
from tests.unit.branching import batch_of, random_episode

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of every optional kernel it lacks
]

LAYOUTS = {
    "one": {"num_ranks": 1},
    "tp2": {"num_ranks": 2, "tensor_parallel_size": 2},
    "tp2_sp": {"num_ranks": 2, "tensor_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"num_ranks": 2, "pipeline_parallel_size": 2},
    "dp2": {"num_ranks": 2},
    "dp2_sharded_optimizer": {"num_ranks": 2, "distributed_optimizer": True},
    "tp2_dp2": {"num_ranks": 4, "tensor_parallel_size": 2},
    "pp2_dp2": {"num_ranks": 4, "pipeline_parallel_size": 2},
    "pp2_vpp2": {"num_ranks": 2, "pipeline_parallel_size": 2, "virtual_pipeline_size": 2},
    "pp2_last1": {"num_ranks": 2, "pipeline_parallel_size": 2, "last_stage_layers": 1},
    "tp2_pp3_last2": {
        "num_ranks": 6,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 3,
        "last_stage_layers": 2,
    },
    "tp2_sp_pp2_vpp2": {
        "num_ranks": 4,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "virtual_pipeline_size": 2,
        "sequence_parallel": True,
    },
    "pp2_vpp2_dp2_sharded_optimizer": {
        "num_ranks": 4,
        "pipeline_parallel_size": 2,
        "virtual_pipeline_size": 2,
        "distributed_optimizer": True,
    },
    "pp2_vpp2_cp2": {
        "num_ranks": 4,
        "pipeline_parallel_size": 2,
        "virtual_pipeline_size": 2,
        "context_parallel_size": 2,
    },
    "cp2": {"num_ranks": 2, "context_parallel_size": 2},
    "cp4": {"num_ranks": 4, "context_parallel_size": 4},
    "tp2_sp_cp2": {
        "num_ranks": 4,
        "tensor_parallel_size": 2,
        "context_parallel_size": 2,
        "sequence_parallel": True,
    },
    "pp2_cp2": {"num_ranks": 4, "pipeline_parallel_size": 2, "context_parallel_size": 2},
    "cp2_dp2_sharded_optimizer": {"num_ranks": 4, "context_parallel_size": 2, "distributed_optimizer": True},
}
BEFORE_A_COMMIT = ("one", "tp2", "pp2_vpp2_cp2", "dp2_sharded_optimizer")
"""Every axis once; every other layout is in ``make nightly``."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}
    for tied in (False, True):
        folder = tmp_path_factory.mktemp("model")
        made[tied] = (folder, make_model(folder, tied=tied, num_layers=4))
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name in BEFORE_A_COMMIT else pytest.mark.nightly) for name in LAYOUTS],
)
def test_gtpo_on_every_layout(models, tmp_path, layout):
    folder, model = models[layout in ("tp2", "pp2_dp2", "pp2_vpp2_cp2")]
    compare(tmp_path, model, make_config(folder, LAYOUTS[layout]))


@pytest.mark.slow
def test_every_axis_at_once(models, tmp_path):
    folder, model = models[True]
    layout = {
        "num_ranks": 8,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "virtual_pipeline_size": 2,
        "context_parallel_size": 2,
        "sequence_parallel": True,
        "distributed_optimizer": True,
    }
    compare(tmp_path, model, make_config(folder, layout))


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["dp2", "cp2"])
@pytest.mark.parametrize("algorithm", [GRPOSConfig(), GRPOConfig(), GTPOConfig(loss_denominator="group")])
def test_other_denominators_do_not_depend_on_the_cut(models, tmp_path, algorithm, layout):
    """GRPO-S's ratio is of a whole response, whose tokens context-parallel ranks share."""
    folder, model = models[False]
    config = make_config(folder, LAYOUTS[layout], micro_batch_tokens=17, algorithm=algorithm)
    compare(tmp_path, model, config)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("layout", "micro_batch_tokens"), [("tp2_sp", 1), ("tp2_sp", 1000), ("pp2_vpp2", 1), ("pp2_vpp2", 1000)]
)
def test_the_cut_into_micro_batches_changes_nothing(models, tmp_path, layout, micro_batch_tokens):
    """Eight micro-batches, and one; the other tests have three or four, and an interleaved pipeline wants two."""
    folder, model = models[True]
    config = make_config(folder, LAYOUTS[layout], micro_batch_tokens=micro_batch_tokens)
    compare(tmp_path, model, config, norm_rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_tokens", [1, pytest.param(1000, marks=pytest.mark.nightly)])
def test_the_order_of_responses_changes_nothing(models, tmp_path, micro_batch_tokens):
    """Scores, and so entropies and credit, stay with their responses through any cut."""
    folder, model = models[True]
    config = make_config(folder, LAYOUTS["one"], micro_batch_tokens=micro_batch_tokens)
    compare(tmp_path, model, config, dealing="permuted", norm_rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("cp2", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("cp4", "tp2_sp_cp2", "pp2_vpp2_cp2")),
    ],
)
def test_all_tokens_of_the_loss_are_on_one_of_the_ranks_that_share_sequences(models, tmp_path, layout):
    """Long prompts, responses of one token."""
    folder, model = models[False]
    ones = torch.ones(8, dtype=torch.int64)
    rollouts = make_rollouts(prompt_lengths=8 * ones, response_lengths=ones, loss_mask=mask_of_lengths(ones, 12))
    compare(tmp_path, model, make_config(folder, LAYOUTS[layout]), rollouts=rollouts, norm_rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("tp2", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("one", "tp2_sp", "tp2_dp2")),
    ],
)
def test_norms_of_queries_and_keys(tmp_path, layout):
    """Every tensor-parallel rank has a copy of their weights, and its heads' part of their gradients."""
    model = make_family_model(tmp_path / "model", FAMILIES["qwen3"])
    compare(tmp_path, model, make_config(tmp_path / "model", LAYOUTS[layout]), norm_rtol=1e-6)


WINDOWED = ("mistral_window", "olmo3", "exaone4", "gemma3", "cwm")
OTHERS = (
    *("mistral", "seed_oss", "smollm3", "ernie4_5", "phi4", "phi4_mini", "ministral3", "granite", "glm4", "olmo2"),
    *("gemma", "glm", "helium", "hunyuan", *WINDOWED),
)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(
            family, name, marks=pytest.mark.slow if (family, name) == ("olmo2", "tp2_sp_cp2") else pytest.mark.nightly
        )
        for family in OTHERS
        for name in ("tp2_sp_cp2", "pp2_cp2", "tp2_dp2", "dp2_sharded_optimizer")
    ],
)
def test_other_families(tmp_path, family, layout):
    model = make_family_model(tmp_path / "model", FAMILIES[family])
    # of a family with windows they share heads, of which tensor ranks have one each: those ranks are replicas
    no_context = {"context_parallel_size": 1} if family in WINDOWED and layout == "tp2_sp_cp2" else {}
    compare(tmp_path, model, make_config(tmp_path / "model", LAYOUTS[layout] | no_context), norm_rtol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout", ["dp2", "tp2_dp2", "pp2_dp2", "cp2_dp2_sharded_optimizer", "pp2_vpp2_dp2_sharded_optimizer"]
)
def test_a_replica_without_responses(models, tmp_path, layout):
    folder, model = models[False]
    compare(tmp_path, model, make_config(folder, LAYOUTS[layout]), dealing="uneven")


@pytest.mark.nightly
@pytest.mark.parametrize("masked", [False, True])
def test_responses_cut_by_the_length_limit(models, tmp_path, masked):
    """Rows 2 and 5 are cut: masked, they leave the loss and its denominator but stay in their group's statistics."""
    folder, model = models[False]
    config = make_config(folder, LAYOUTS["dp2"], updates={"mask_truncated": masked})
    compare(tmp_path, model, config)


def two_updates(rank, world_size, init_method, config, folder):
    """A step of two mini-batches, once with a shard of the whole batch a replica and once with one of each update."""
    from gtpo_megatron.actor.actor import MegatronActor

    rollouts, found = make_rollouts(), []
    lengths = (rollouts.prompt_lengths + rollouts.response_lengths).tolist()
    updates = updates_of_step(config, (5, 9), step=1)
    for name, known in (("whole", []), ("by_update", updates)):
        actor = MegatronActor(config, global_rank=rank, init_method=f"{init_method}_{name}")
        rows = shard_by_updates(lengths, rollouts.group_ids.tolist(), known, world_size)[actor.coordinates.data_index]
        actor.score_tokens(RolloutShard.of(rollouts, rows))
        actor.credit_tokens(make_rewards())
        advantages = dict(zip(rows, actor.batch.advantages, strict=True))
        metrics = actor.update(1)
        write_slices(f"{folder}/{name}", actor, config)
        found.append((rows, advantages, metrics))
        actor.close()
    return found


@pytest.mark.slow
def test_mini_batches_do_not_depend_on_who_has_which_rows(models, tmp_path):
    """Group 5 and group 9 are an update each: each is on one replica, or both are on both."""
    folder, _ = models[False]
    config = make_config(folder, LAYOUTS["dp2"], updates={"updates_per_rollout": 2, "mini_batch_prompts": 1})
    ranks = run_processes(two_updates, 2, config, str(tmp_path), timeout_s=120)
    (whole, by_update) = zip(*ranks, strict=True)
    assert [{row // 4 for row in rows} for rows, _, _ in whole] == [{0}, {1}]
    assert [{row // 4 for row in rows} for rows, _, _ in by_update] == [{0, 1}, {0, 1}]
    first, second = ({row: one for _, found, _ in dealt for row, one in found.items()} for dealt in (whole, by_update))
    for row, advantages in first.items():
        width = min(len(advantages), len(second[row]))
        torch.testing.assert_close(second[row][:width], advantages[:width], rtol=1e-4, atol=2e-5)
    one, other = (to_scalars(merge(metrics for _, _, metrics in dealt)) for dealt in (whole, by_update))
    for name in ("policy/loss", "optimizer/grad_norm"):
        assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6)
    weights = read_tensors(str(tmp_path / "whole"), config.model.path)
    for name, tensor in read_tensors(str(tmp_path / "by_update"), config.model.path).items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=5e-5)


@pytest.mark.nightly
def test_credit_refuses_scores_of_another_policy(models):
    folder, _ = models[False]
    config = make_config(folder, LAYOUTS["one"])

    def refused(rank, world_size, init_method):
        from gtpo_megatron.actor.actor import MegatronActor

        actor = MegatronActor(config, global_rank=rank, init_method=init_method)
        actor.score_tokens(RolloutShard.of(make_rollouts(policy_version=3), range(8)))
        scores = actor.batch
        assert (scores.policy_version, scores.scored_version) == (3, 0)
        with pytest.raises(DataError, match="policy version 3 were scored under version 0"):
            actor.credit_tokens(make_rewards())
        with pytest.raises(StageOrderError, match="update needs the batch that credit_tokens leaves, but score_tokens"):
            actor.update(1)
        actor.release_batch()
        with pytest.raises(StageOrderError, match="rows_of_groups needs .* but release_batch came before it"):
            actor.rows_of_groups([10])
        with pytest.raises(StageOrderError, match="score_tokens or use_sampler_scores leaves, but release_batch came"):
            actor.credit_tokens(make_rewards())
        actor.score_tokens(RolloutShard.of(make_rollouts(policy_version=0), range(8)))
        actor.credit_tokens(make_rewards())
        with pytest.raises(StageOrderError, match="but credit_tokens came before it"):
            actor.credit_tokens(make_rewards())
        actor.update(1)
        with pytest.raises(StageOrderError, match="but update came before it") as caught:  # off policy, unseen
            actor.update(1)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)

    run_processes(refused, 1)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("dp2", "cp2"))])
def test_rewards_of_turns_reach_the_tokens_of_their_turns(models, tmp_path, layout):
    folder, model = models[False]
    fields = {
        "algorithm": GTPOConfig(turn_reward_coef=0.5, one_sided_groups="keep"),
        "environment": EnvironmentConfig(name="recipes.calculator:Calculator"),
        "reward": RewardConfig(),
    }
    compare(tmp_path, model, make_config(folder, LAYOUTS[layout], **fields), failed=(5,))


def branching_rollouts():
    """Eight responses, of which most have several sequences; one is longer than the others' micro-batches."""
    batch = batch_of([random_episode(seed) for seed in (3, 8, 11, 14, 15, 21, 26, 30)])
    assert sum(bool(branches) for branches in batch.branches) >= 5
    assert int(batch.sequence_tokens.max()) > 40
    return dataclasses.replace(batch, prompt_ids=batch.prompt_ids % VOCAB, response_ids=batch.response_ids % VOCAB)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "algorithm"),
    [
        ("one", GTPOConfig(entropy_axis="turn")),  # a response's sequences in different micro-batches
        ("cp2", GTPOConfig()),
        pytest.param("dp2", GRPOSConfig(), marks=pytest.mark.nightly),  # all of them in one
        pytest.param("dp2", GRPOConfig(), marks=pytest.mark.nightly),
        pytest.param("pp2_vpp2_cp2", GTPOConfig(), marks=pytest.mark.nightly),
        pytest.param("tp2_sp", GTPOConfig(), marks=pytest.mark.nightly),
    ],
)
def test_responses_that_branch(models, tmp_path, layout, algorithm):
    folder, model = models[False]
    fields = {"algorithm": algorithm, "environment": EnvironmentConfig(name="recipes.calculator:Calculator")}
    config = make_config(folder, LAYOUTS[layout], micro_batch_tokens=24, reward=RewardConfig(), **fields)
    compare(tmp_path, model, config, rollouts=branching_rollouts())


def rollouts_of_prompts():
    """Four responses to each of two prompts, of which the first begins the second; one of them has no token."""
    lengths = torch.tensor([9, 4, 12, 1, 7, 0, 7, 7])
    rollouts = make_rollouts(response_lengths=lengths, loss_mask=mask_of_lengths(lengths, 12))
    prompts = rollouts.prompt_ids[[7] * 8]
    return dataclasses.replace(rollouts, prompt_ids=prompts, prompt_lengths=torch.tensor([5] * 4 + [8] * 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "micro_batch_tokens"),
    [
        ("one", 1000),
        ("tp2_sp_pp2_vpp2", 20),
        *(pytest.param(name, 20, marks=pytest.mark.nightly) for name in ("one", "dp2", "tp2", "pp2", "cp2")),
    ],
)
def test_a_prompt_is_run_once_for_all_its_responses(models, tmp_path, layout, micro_batch_tokens):
    folder, model = models[False]
    config = make_config(folder, LAYOUTS[layout], micro_batch_tokens=micro_batch_tokens)
    compare(tmp_path, model, config, rollouts=rollouts_of_prompts(), shares_tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_prompt_is_run_once_more_for_all_its_responses(models, tmp_path, recompute):
    folder, model = models[False]
    config = make_config(folder, LAYOUTS["one"], micro_batch_tokens=1000)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, recompute=recompute))
    compare(tmp_path, model, config, rollouts=rollouts_of_prompts(), shares_tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "gemma3",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in (*OTHERS, "deepseek_dense") if name != "gemma3"),
    ],
)
def test_families_run_a_prompt_once(tmp_path, family):
    """Among them windows, two rotary embeddings, norms behind the rotation and multi-latent attention."""
    model = make_family_model(tmp_path / "model", FAMILIES[family])
    config = make_config(tmp_path / "model", LAYOUTS["one"], micro_batch_tokens=1000)
    compare(tmp_path, model, config, rollouts=rollouts_of_prompts(), shares_tokens=True, norm_rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("are_together", [False, True])
def test_what_branches_have_in_common_is_run_once(models, tmp_path, are_together):
    folder, model = models[False]
    fields = {
        "algorithm": GRPOSConfig() if are_together else GTPOConfig(),
        "environment": EnvironmentConfig(name="recipes.calculator:Calculator"),
    }
    config = make_config(folder, LAYOUTS["one"], micro_batch_tokens=24, reward=RewardConfig(), **fields)
    compare(tmp_path, model, config, rollouts=branching_rollouts(), shares_tokens=True)


@pytest.mark.nightly
def test_a_response_without_a_verdict_takes_no_part(models, tmp_path):
    folder, model = models[False]
    compare(tmp_path, model, make_config(folder, LAYOUTS["dp2"]), failed=(0, 5))
