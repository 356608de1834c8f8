"""A teacher of another shape on the student's ranks: its log-probs, and the update that follows from them."""

import dataclasses

import pytest
import torch

from gtpo_megatron.batch import RolloutShard
from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.config.algorithm import DistillConfig, ReferenceKLConfig, TeacherConfig
from gtpo_megatron.errors import ConfigError
from tests.dist_utils import run_processes
from tests.distributed.family_models import FAMILIES, MIXTURES, FamilyModel, make_family_model
from tests.distributed.one_update import compare
from tests.distributed.test_actor_layouts import LAYOUTS
from tests.distributed.tiny_world import VOCAB, dense_scores, make_config, make_model, make_rollouts, own_tokens

pytestmark = [
    pytest.mark.slow,
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of every optional kernel it lacks
]

TEACHER = FamilyModel(
    "Qwen3",
    {
        "vocab_size": VOCAB + 4,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
)
"""Another family than the student's: wider, deeper, with more rows of the vocabulary, tied."""

ALGORITHM = DistillConfig(reward_coef=0.5, entropy_coef=0.5)
QUICK = ("one", "tp2_sp", "pp2", "cp2")
AT_NIGHT = ("tp2", "dp2_sharded_optimizer", "pp2_vpp2", "pp2_vpp2_cp2", "tp2_sp_cp2", "tp2_sp_pp2_vpp2", "pp2_dp2")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folder and model of the student, and of the teacher."""
    student, teacher = tmp_path_factory.mktemp("student"), tmp_path_factory.mktemp("teacher")
    return student, make_model(student, tied=False, num_layers=4), teacher, make_family_model(teacher, TEACHER)


def with_teacher(folder, teacher, layout, algorithm=ALGORITHM, **fields):
    return make_config(folder, layout, algorithm=algorithm, teacher=TeacherConfig(path=str(teacher)), **fields)


@pytest.mark.parametrize("layout", [*QUICK, *(pytest.param(name, marks=pytest.mark.nightly) for name in AT_NIGHT)])
def test_scores_and_update_equal_those_of_two_models(made, tmp_path, layout):
    """Of transformers: the teacher's log-probs, credit, loss, every gradient and the new weights of the student."""
    folder, model, teacher, teacher_model = made
    config = with_teacher(folder, teacher, LAYOUTS[layout])
    scalars = compare(tmp_path, model, config, teacher_model=teacher_model)
    batch = make_rollouts(loss_mask=own_tokens())
    logprobs, taught = (dense_scores(one, batch)[0].detach().double() for one in (model, teacher_model))
    difference = (logprobs - taught)[batch.loss_mask]
    assert scalars["policy/kl_teacher_nats"] == pytest.approx(float(difference.mean()), rel=1e-4)


@pytest.mark.nightly
def test_beside_a_reference_policy(made, tmp_path):
    folder, model, teacher, teacher_model = made
    algorithm = DistillConfig(reference_kl=ReferenceKLConfig(coef=0.5))
    config = with_teacher(folder, teacher, LAYOUTS["tp2_sp"], algorithm)
    compare(tmp_path, model, config, teacher_model=teacher_model, ref_model=model)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["gemma3", "olmo2", "granite", "llama3_1", "qwen3_5"])
def test_teachers_of_other_families(made, tmp_path, family):
    folder, model, *_ = made
    teacher_model = make_family_model(tmp_path / "teacher", FAMILIES[family])
    compare(tmp_path, model, with_teacher(folder, tmp_path / "teacher", LAYOUTS["tp2"]), teacher_model=teacher_model)


@pytest.mark.nightly
def test_a_teacher_with_latent_attention(made, tmp_path):
    folder, model, *_ = made
    family = FAMILIES["deepseek_dense"]
    rope = {**family.changes["rope_parameters"], "original_max_position_embeddings": 16}  # times 4: the run's 64
    teacher = dataclasses.replace(family, changes={**family.changes, "rope_parameters": rope})
    teacher_model = make_family_model(tmp_path / "teacher", teacher)
    compare(tmp_path, model, with_teacher(folder, tmp_path / "teacher", LAYOUTS["pp2"]), teacher_model=teacher_model)


@pytest.mark.nightly
def test_a_mixture_of_experts_teaches_a_dense_model(made, tmp_path):
    folder, model, *_ = made
    teacher_model = make_family_model(tmp_path / "teacher", MIXTURES["qwen3_moe"])
    compare(tmp_path, model, with_teacher(folder, tmp_path / "teacher", LAYOUTS["tp2_sp"]), teacher_model=teacher_model)


def scored_by_teacher(rank, world_size, init_method, config, rollouts):
    from gtpo_megatron.actor.actor import MegatronActor  # ranks have it already

    actor = MegatronActor(config, global_rank=rank, init_method=init_method)
    if rollouts.token_entropy is None:
        actor.score_tokens(RolloutShard.of(rollouts, range(8)))
    else:
        actor.use_sampler_scores(RolloutShard.of(rollouts, range(8)))
    found = actor.batch.old_logprobs, actor.batch.teacher_logprobs
    actor.close()
    return found


def test_tokens_that_the_teacher_has_no_row_for(made, tmp_path):
    """It reads another in their place, and gives them next to no probability."""
    folder, *_ = made
    smaller = dataclasses.replace(TEACHER, changes={**TEACHER.changes, "vocab_size": VOCAB - 5})
    teacher_model = make_family_model(tmp_path, smaller)
    rollouts = make_rollouts()
    [(_, found)] = run_processes(scored_by_teacher, 1, with_teacher(folder, tmp_path, LAYOUTS["one"]), rollouts)
    known = {
        name: torch.where(getattr(rollouts, name) < VOCAB - 5, getattr(rollouts, name), 0)
        for name in ("prompt_ids", "response_ids")
    }
    wanted = dense_scores(teacher_model, dataclasses.replace(rollouts, **known))[0].detach()
    is_absent = rollouts.loss_mask & (rollouts.response_ids >= VOCAB - 5)
    assert is_absent.any()
    torch.testing.assert_close(found, torch.where(is_absent, -20.0, wanted), rtol=1e-4, atol=2e-5)


def test_with_the_samplers_scores(made):
    folder, _, teacher, teacher_model = made
    config = with_teacher(folder, teacher, LAYOUTS["one"])
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, entropy_source="rollout"))
    rollouts = make_rollouts(token_entropy=torch.ones(8, 12), rollout_logprobs=-torch.ones(8, 12))
    [(old, found)] = run_processes(scored_by_teacher, 1, config, rollouts)
    assert torch.equal(old, rollouts.rollout_logprobs)
    torch.testing.assert_close(found, dense_scores(teacher_model, rollouts)[0].detach(), rtol=1e-4, atol=2e-5)


def taught_by_its_base(rank, world_size, init_method, config):
    """Log-probs of student and teacher before an update and after it, and how many models there are."""
    from gtpo_megatron.actor.actor import MegatronActor
    from tests.distributed.tiny_world import make_rewards

    actor = MegatronActor(config, global_rank=rank, init_method=init_method)
    found = []
    for step in (1, 2):
        actor.score_tokens(RolloutShard.of(make_rollouts(policy_version=step - 1), range(8)))
        found.append((actor.batch.old_logprobs, actor.batch.teacher_logprobs))
        actor.credit_tokens(make_rewards())
        actor.update(step)
    assert actor._scoring._teacher.chunks is actor._model  # at no memory of its own
    actor.close()
    return found


@pytest.mark.parametrize("layout", ["one", pytest.param("tp2", marks=pytest.mark.nightly)])
def test_the_base_of_adapters_teaches_them(made, layout):
    """The student leaves it by the rewards' part of the credit, and the teacher stays where it was."""
    folder, model, *_ = made
    config = with_teacher(
        folder, folder, LAYOUTS[layout], DistillConfig(reward_coef=1.0), adapter=AdapterConfig(rank=4, alpha=8.0)
    )
    wanted = dense_scores(model, make_rollouts())[0].detach()
    for before, after in run_processes(taught_by_its_base, config.parallel.num_ranks, config):
        torch.testing.assert_close(before[0], before[1], rtol=0, atol=1e-6)
        torch.testing.assert_close(before[1], wanted, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(after[1], before[1], rtol=0, atol=1e-6)
        assert (after[0] - before[0]).abs().max() > 1e-3


def test_another_folder_teaches_adapters(made):
    folder, _, teacher, teacher_model = made
    config = with_teacher(folder, teacher, LAYOUTS["one"], adapter=AdapterConfig(rank=4, alpha=8.0))
    [(_, found)] = run_processes(scored_by_teacher, 1, config, make_rollouts())
    torch.testing.assert_close(found, dense_scores(teacher_model, make_rollouts())[0].detach(), rtol=1e-4, atol=2e-5)


def test_a_layout_that_does_not_divide_it_is_one_line(made, tmp_path):
    folder, *_ = made
    odd = dataclasses.replace(TEACHER, changes={**TEACHER.changes, "num_hidden_layers": 3})
    make_family_model(tmp_path, odd)
    config = with_teacher(folder, tmp_path, LAYOUTS["pp2"])

    def refused(rank, world_size, init_method):
        from gtpo_megatron.actor.actor import MegatronActor

        with pytest.raises(ConfigError, match=r"teacher.path=.*num_layers=3"):
            MegatronActor(config, global_rank=rank, init_method=init_method)

    run_processes(refused, 2)
