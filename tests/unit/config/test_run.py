"""Checks that span the parts of a run."""

import dataclasses
import re

import pytest

from gtpo_megatron.config.algorithm import DAPOConfig, OffPolicyConfig
from gtpo_megatron.config.algorithm.base import GroupRelativeLengthPenalty, SoftOverlongPenalty
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.config.problems import metric_names
from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.errors import ConfigError
from recipes import tiny_cpu


def changed(**parts):
    """The tiny recipe with some fields of its parts replaced: ``changed(data={"max_prompt_tokens": 5})``."""
    config = tiny_cpu.gtpo()
    replaced = {
        name: dataclasses.replace(getattr(config, name), **fields) if isinstance(fields, dict) else fields
        for name, fields in parts.items()
    }
    return dataclasses.replace(config, **replaced)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"name": " "}, "name is empty"),
        ({"num_steps": 0}, "num_steps=0"),
        ({"seed": -1}, "seed=-1"),
        ({"model": {"max_sequence_tokens": 100}}, "exceeds model.max_sequence_tokens=100"),
        ({"data": {"max_prompt_tokens": 150}}, "data.max_prompt_tokens=150"),
        ({"update": {"mini_batch_prompts": 33}}, "update.mini_batch_prompts=33 exceeds data.prompts_per_step=32"),
        ({"optimizer": {"offload_fraction": 0.5}}, "offload_fraction=0.5 needs parallel.distributed_optimizer=True"),
        ({"profile": {"tool": "torch", "ranks": (0, 2)}}, "profile.ranks=(0, 2): there are ranks 0 to 1"),
        (
            {"num_steps": 3, "profile": {"tool": "torch", "num_steps": 3}},
            "profile.first_step=2 with profile.num_steps=3 ends at step 4, past num_steps=3",
        ),
        ({"cluster": {"mode": "local"}}, "cluster.mode='local' runs one rank"),
        (
            {"rollout": {"entropy_source": "rollout"}, "balance": {"aux_loss_coef": 0.1}},
            "balance.aux_loss_coef=0.1: the loss takes the experts' loads from the scoring pass",
        ),
        (
            {"rollout": {"entropy_source": "rollout"}, "update": {"routing_replay": "score"}},
            "update.routing_replay='score': there is no scoring pass to replay",
        ),
        (
            {"update": {"routing_replay": "rollout"}},
            "update.routing_replay='rollout' with rollout.returns_routing=False",
        ),
        (
            {"rollout": {"sampling": SamplingConfig(temperature=0.0, max_response_tokens=64)}},
            "rollout.sampling.temperature=0.0",
        ),
        (
            {"cluster": {"mode": "local"}, "parallel": ParallelConfig(num_ranks=1), "rollout": {"num_engines": 2}},
            "cluster.mode='local' has one engine, got rollout.num_engines=2",
        ),
        (
            {
                "cluster": {"mode": "local"},
                "parallel": ParallelConfig(num_ranks=1),
                "rollout": {"nodes_per_engine": 2, "pipeline_parallel_size": 2},
            },
            "cluster.mode='local' is one process, got rollout.nodes_per_engine=2",
        ),
        ({"rollout": {"placement": "colocated", "num_engines": 3}}, "needs 3 ranks to share GPUs"),
        (
            {"rollout": {"placement": "colocated", "tensor_parallel_size": 2, "pipeline_parallel_size": 2}},
            "needs 4 ranks to share GPUs",
        ),
        (
            {"rollout": {"nodes_per_engine": 3, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}},
            "nodes_per_engine=3 must divide the 4 ranks of an engine",
        ),
        (
            {"rollout": {"pipeline_parallel_size": 2, "partial": True, "max_staleness": 1}},
            "partial=True with pipeline_parallel_size=2",
        ),
        (
            {"rollout": {"pipeline_parallel_size": 2, "entropy_source": "rollout"}},
            "entropy_source='rollout' with pipeline_parallel_size=2",
        ),
        (
            {"rollout": {"pipeline_parallel_size": 2, "returns_routing": True}},
            "returns_routing=True with pipeline_parallel_size=2",
        ),
        (
            {
                "rollout": {"pipeline_parallel_size": 2},
                "adapter": {"rank": 4, "push": "adapters"},
                "optimizer": {"learning_rate": 1e-4},
            },
            "adapter.push='adapters' with rollout.pipeline_parallel_size=2",
        ),
        ({"rollout": {"max_staleness": 1}}, "rollout.max_staleness=1 with algorithm.off_policy.mode='off'"),
        ({"rollout": {"dtype": "fp8"}}, "rollout.dtype='fp8' with algorithm.off_policy.mode='off'"),
        (
            {
                "rollout": {"dtype": "fp8", "entropy_source": "rollout"},
                "algorithm": {"off_policy": OffPolicyConfig(mode="truncate")},
            },
            "rollout.entropy_source='rollout' with algorithm.off_policy.mode='truncate'",
        ),
        ({"rollout": {"max_staleness": 1, "placement": "colocated"}}, "max_staleness=1 with placement='colocated'"),
        ({"rollout": {"partial": True}}, "partial=True with max_staleness=0"),
        ({"rollout": {"max_staleness": 65}}, "max_staleness=65: must lie between 0 and 64"),
        ({"rollout": {"over_sample": 0.5}}, "over_sample=0.5: must be 1 or more"),
        ({"rollout": {"over_sample": 1.5}}, "over_sample=1.5 with max_staleness=0 and stragglers='wait'"),
        ({"rollout": {"stragglers": "abort"}}, "stragglers='abort' with max_staleness=0: the step needs all groups"),
        ({"rollout": {"stragglers": "drop"}}, "stragglers='drop'"),
        (
            {
                "rollout": {"max_staleness": 1, "partial": True},
                "algorithm": {"off_policy": OffPolicyConfig(mode="truncate")},
                "cluster": {"mode": "local"},
                "parallel": ParallelConfig(num_ranks=1),
            },
            "cluster.mode='local' samples the groups of a step together, got rollout.max_staleness=1, partial=True",
        ),
        (
            {"rollout": {"max_staleness": 1, "entropy_source": "rollout"}},
            "max_staleness=1 with entropy_source='rollout'",
        ),
        (
            {"rollout": {"sampling": SamplingConfig(top_p=0.9, max_response_tokens=64)}},
            "rollout.sampling.top_p=0.9",
        ),
        (
            {"rollout": {"sampling": SamplingConfig(top_k=5, max_response_tokens=64)}},
            "rollout.sampling.top_k=5",
        ),
        (
            {"rollout": {"entropy_source": "rollout"}, "update": {"updates_per_rollout": 2}},
            "update.updates_per_rollout=2: updates after the first need",
        ),
        (
            {
                "rollout": {"entropy_source": "rollout"},
                "algorithm": {"off_policy": OffPolicyConfig(mode="truncate")},
            },
            "algorithm.off_policy.mode='truncate'",
        ),
        ({"checkpoint": {"keep_best": 1}, "evaluation": {"every_steps": 0}}, "checkpoint.keep_best=1 needs"),
        (
            {"checkpoint": {"keep_best": 1, "best_metric": "eval/aime24_mean_at_k"}},
            "checkpoint.best_metric='eval/aime24_mean_at_k': measured are eval/heldout_mean_at_k, eval/heldout_",
        ),
        (
            {"checkpoint": {"keep_best": 1, "best_metric": "eval/heldout_mean_at_kk"}},
            "checkpoint.best_metric='eval/heldout_mean_at_kk': measured are eval/heldout_mean_at_k, ",
        ),
        (
            {"algorithm": DAPOConfig()},
            "algorithm.length_penalty.max_tokens=4096 differs from rollout.sampling.max_response_tokens=128: the "
            "penalty's ramp must end where responses are cut; set --algorithm.length-penalty.max-tokens 128",
        ),
        (
            {"algorithm": {"length_penalty": GroupRelativeLengthPenalty(hard_group_penalty=SoftOverlongPenalty())}},
            "set --algorithm.length-penalty.hard-group-penalty.max-tokens 128",
        ),
    ],
)
def test_parts_that_do_not_fit_together(parts, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        changed(**parts)


@pytest.mark.parametrize(("dtype", "is_advised"), [("bfloat16", True), ("fp8", False)])
def test_a_correction_that_the_weights_need_is_not_advised_away(dtype, is_advised):
    correction = {"off_policy": OffPolicyConfig(mode="truncate")}
    with pytest.raises(ConfigError, match="the correction needs the trainer's log-probs") as refused:
        changed(rollout={"dtype": dtype, "entropy_source": "rollout"}, algorithm=correction)
    assert ("off-policy.mode off" in str(refused.value)) == is_advised


def test_one_process_is_fine_with_one_rank():
    config = changed(cluster={"mode": "local"}, parallel=ParallelConfig(num_ranks=1))
    assert config.parallel.data_parallel_size == 1


def test_a_penalty_that_ends_at_the_sampling_limit_is_fine():
    ramp = SoftOverlongPenalty(max_tokens=128, buffer_tokens=16)
    for penalty in (ramp, GroupRelativeLengthPenalty(hard_group_penalty=ramp)):
        assert changed(algorithm={"length_penalty": penalty}).algorithm.length_penalty == penalty


def test_in_a_conversation_a_penalty_may_end_before_the_limit():
    """The limit is of everybody's tokens, a length of the policy's own."""
    ramp = SoftOverlongPenalty(max_tokens=64, buffer_tokens=16)
    for penalty in (ramp, GroupRelativeLengthPenalty(hard_group_penalty=ramp)):
        with pytest.raises(ConfigError, match="max_tokens=64 differs from rollout.sampling.max_response_tokens=128"):
            changed(algorithm={"length_penalty": penalty})
        config = changed(algorithm={"length_penalty": penalty}, environment={"name": "mine:Talks"})
        assert config.algorithm.length_penalty == penalty
    with pytest.raises(ConfigError, match="max_tokens=129 .*: the penalty's ramp must end where responses are cut, or"):
        changed(
            algorithm={"length_penalty": dataclasses.replace(ramp, max_tokens=129)}, environment={"name": "mine:Talks"}
        )


def test_every_metric_of_a_set_can_choose_the_best_checkpoint():
    for name in metric_names("heldout"):
        assert changed(checkpoint={"keep_best": 1, "best_metric": name}).checkpoint.best_metric == name


def test_number_of_updates():
    assert changed(num_steps=5, update={"updates_per_rollout": 3}).num_updates == 15


@pytest.mark.parametrize("recipe", [tiny_cpu.gtpo, tiny_cpu.grpo_s, tiny_cpu.dapo, tiny_cpu.grpo])
def test_recipes_differ_in_name_and_algorithm_only(recipe):
    config, reference = recipe(), tiny_cpu.gtpo()
    assert dataclasses.replace(config, name=reference.name, algorithm=reference.algorithm) == reference
    assert recipe is tiny_cpu.gtpo or config.algorithm != reference.algorithm


def test_prompts_that_no_update_would_use_are_refused_of_a_new_run_alone():
    config = changed(update={"mini_batch_prompts": 9, "updates_per_rollout": 3})  # a recorded one can be read
    with pytest.raises(
        ConfigError, match=r"would train 27 of data.prompts_per_step=32 .* --update.updates-per-rollout 4"
    ):
        config.check_new()
    changed(update={"mini_batch_prompts": 9, "updates_per_rollout": 4}).check_new()
