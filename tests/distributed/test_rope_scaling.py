"""Stretched rotary embeddings of every family equal those of transformers, beyond the original context too."""

import dataclasses

import pytest
import torch

from gtpo_megatron.batch import RolloutShard
from gtpo_megatron.weights.config_json import read_architecture
from tests.dist_utils import run_processes
from tests.distributed.expert_models import EXPERT_FAMILIES, make_expert_model
from tests.distributed.family_models import FamilyModel, make_family_model
from tests.distributed.tiny_world import dense_scores, make_config, make_rollouts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of every optional kernel it lacks
]

ORIGINAL = 6
"""Tokens; most sequences of the batch are longer, up to 15."""
KINDS = {
    # bases so small that 15 positions are many turns
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "rope_theta": 20.0},
    # as the card of Qwen2.5 has it: the other field says the original context
    "yarn_card": {"type": "yarn", "factor": 4.0, "rope_theta": 20.0, "max_position_embeddings": ORIGINAL},
    "yarn_with_mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "rope_theta": 20.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "yarn_with_factor": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": ORIGINAL,
        "rope_theta": 50.0,
        "attention_factor": 1.7,
        "beta_fast": 2.0,
        "beta_slow": 0.1,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 0.2,
        "high_freq_factor": 0.9,
        "original_max_position_embeddings": ORIGINAL,
        "rope_theta": 20.0,
    },
}
LATENT_KINDS = ("yarn", "yarn_card", "yarn_with_mscale")
"""Of multi-latent attention; ``mscale_all_dim`` is a factor of all its scores besides, other kinds are refused."""
SOME = {
    "deepseek_v3": LATENT_KINDS,
    "deepseek_v2": LATENT_KINDS,
    "deepseek_v2_groups": (),  # the same positions
    "gpt_oss": ("yarn", "yarn_card"),
}
"""Families that do not take all kinds."""
WITHOUT_CONTEXT_PARALLELISM = {"gpt_oss", "qwen3_next", "qwen3_5"}
"""Sinks and delta nets, which read a whole sequence."""
DENSE = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}
LAYOUTS = {
    "one": {"num_ranks": 1},
    "tp2_sp_cp2": {
        "num_ranks": 4,
        "tensor_parallel_size": 2,
        "context_parallel_size": 2,
        "sequence_parallel": True,
    },
    "pp2": {"num_ranks": 2, "pipeline_parallel_size": 2},
}


def make(folder, family, rope):
    rope = dict(rope)
    positions = {"max_position_embeddings": rope.pop("max_position_embeddings", 24)}
    if family in DENSE:
        is_old = family == "llama"  # rope_scaling beside rope_theta, as transformers 4 wrote it
        changes = {"rope_parameters": rope, "head_dim": 8, **positions}
        return make_family_model(folder, FamilyModel(DENSE[family], changes, is_old=is_old))
    # every head of these rotates half of its elements, and only these are multiplied
    partial = {"partial_rotary_factor": 0.5} if family in {"glm4_moe", "qwen3_next", "qwen3_5"} else {}
    mixed = (
        {"full_attention_interval": 2} if family in {"qwen3_next", "qwen3_5"} else {}
    )  # a delta net has no positions
    return make_expert_model(folder, family, num_layers=2, rope_parameters={**rope, **partial}, **mixed, **positions)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    names = [
        (family, kind) for family in (*DENSE, *EXPERT_FAMILIES) for kind in KINDS if kind in SOME.get(family, KINDS)
    ]
    return {name: (folder / "_".join(name), make(folder / "_".join(name), name[0], KINDS[name[1]])) for name in names}


def log_probs(rank, world_size, init_method, configs):
    from gtpo_megatron.actor.actor import MegatronActor  # ranks have it already

    found = {}
    for name, config in configs.items():
        actor = MegatronActor(config, global_rank=rank, init_method=f"{init_method}_{'_'.join(name)}")
        actor.score_tokens(RolloutShard.of(make_rollouts(), range(8)))
        found[name] = actor.batch.old_logprobs if actor.coordinates.has_logits else None
        actor.close()
    return found


def unscaled(folder):
    """The architecture without its stretching: what a config.json says whose ``rope_scaling`` is lost."""
    return dataclasses.replace(read_architecture(folder), rope_scaling=None)


@pytest.mark.parametrize(
    "layout", ["one", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("tp2_sp_cp2", "pp2"))]
)
def test_log_probs_equal_those_of_transformers(models, layout):
    if LAYOUTS[layout].get("context_parallel_size", 1) > 1:
        models = {name: model for name, model in models.items() if name[0] not in WITHOUT_CONTEXT_PARALLELISM}
    configs = {name: make_config(folder, LAYOUTS[layout]) for name, (folder, _) in models.items()}
    ranks = run_processes(log_probs, LAYOUTS[layout]["num_ranks"], configs, timeout_s=300)
    batch = make_rollouts()
    assert int((batch.prompt_lengths + batch.response_lengths).max()) > 2 * ORIGINAL
    for name, (_, model) in models.items():
        with torch.no_grad():
            expected, _ = dense_scores(model, batch)
        for found in ranks:
            if found[name] is not None:
                torch.testing.assert_close(
                    found[name], expected, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
                )


def unscaled_log_probs(rank, world_size, init_method, configs):
    from gtpo_megatron.actor import actor

    actor.read_architecture = unscaled
    return log_probs(rank, world_size, init_method, configs)


@pytest.mark.parametrize("kind", KINDS)
def test_the_stretching_shows_in_these_log_probs(models, kind):
    """Or the test above would prove nothing."""
    folder, model = models["qwen2", kind]
    [found] = run_processes(unscaled_log_probs, 1, {("qwen2", kind): make_config(folder, LAYOUTS["one"])})
    with torch.no_grad():
        expected, _ = dense_scores(model, make_rollouts())
    assert (found["qwen2", kind] - expected).abs().max() > 0.05
