"""Without a scoring pass an update measures the sampler as one with it does."""

import dataclasses

import pytest
import torch

from gtpo_megatron.batch import RolloutShard
from gtpo_megatron.config.algorithm import DPPOConfig
from gtpo_megatron.mismatch.gap_report import merge_gaps
from gtpo_megatron.mismatch.statistics import PREFIX
from gtpo_megatron.observability.metrics import merge, to_scalars
from tests.dist_utils import run_processes
from tests.distributed.tiny_world import make_config, make_model, make_rewards, make_rollouts

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of every optional kernel it lacks
]

LEVELS = ("token", "sequence")


def one_step(rank, world_size, init_method, config, rollouts):
    from gtpo_megatron.actor.actor import MegatronActor  # ranks have it already

    actor = MegatronActor(config, global_rank=rank, init_method=init_method)
    take = actor.score_tokens if config.rollout.entropy_source == "actor" else actor.use_sampler_scores
    metrics = take(RolloutShard.of(rollouts, range(8)))
    scores = actor.batch
    actor.credit_tokens(make_rewards(failed=(3,)))
    updates = to_scalars(actor.update(1))
    return scores, to_scalars(metrics) | {"report": actor.explain_gap(0.01)}, updates


@pytest.mark.parametrize("level", LEVELS)
def test_off_policy_statistics_with_and_without_a_scoring_pass(tmp_path, level):
    make_model(tmp_path, tied=True)
    base = make_config(tmp_path, {"num_ranks": 1})  # several micro-batches
    off_policy = dataclasses.replace(base.algorithm.off_policy, level=level, lower=0.95, upper=1.05)
    base = dataclasses.replace(
        base,
        algorithm=dataclasses.replace(base.algorithm, off_policy=off_policy),
        update=dataclasses.replace(base.update, mask_truncated=True),
    )
    without = dataclasses.replace(base, rollout=dataclasses.replace(base.rollout, entropy_source="rollout"))
    [(scores, _, _)] = run_processes(one_step, 1, base, make_rollouts(), timeout_s=60)
    noise = 0.05 * torch.randn(scores.old_logprobs.shape, generator=torch.Generator().manual_seed(2))
    rollouts = make_rollouts(rollout_logprobs=scores.old_logprobs + noise, token_entropy=scores.token_entropy)
    [(_, before, measured)] = run_processes(one_step, 1, base, rollouts, timeout_s=60)
    [(_, without_pass, found)] = run_processes(one_step, 1, without, rollouts, timeout_s=60)
    names = {name for name in measured if name.startswith("off_policy/")}
    assert len(names) == 5
    assert 0 < measured["off_policy/outside_frac"] < 1
    for name in {*names, "policy/loss"}:
        assert found[name] == pytest.approx(measured[name], rel=1e-4), name
    figures = {name for name in before if name.startswith(PREFIX)}
    assert len(figures) == 6
    for name in figures:
        assert found[name] == pytest.approx(before[name], rel=0.03 if "_p" in name else 1e-3), (
            name
        )  # quantiles: one bin
    assert [(token.row, token.position) for token in without_pass["report"].worst[:5]] == [
        (token.row, token.position) for token in before["report"].worst[:5]
    ]


def a_probe_after_a_step(rank, world_size, init_method, config, rollouts, probe):
    """What the last push's check asks: other responses, scored after an update."""
    from gtpo_megatron.actor.actor import MegatronActor

    actor = MegatronActor(config, global_rank=rank, init_method=init_method)
    (actor.score_tokens if config.rollout.entropy_source == "actor" else actor.use_sampler_scores)(
        RolloutShard.of(rollouts, range(8))
    )
    actor.credit_tokens(make_rewards())
    actor.update(1)
    actor.score_tokens(RolloutShard.of(probe, range(0, 8, 2)))
    return actor.explain_gap(0.01)


def test_a_probe_is_compared_by_its_own_scores(tmp_path):
    make_model(tmp_path, tied=True)
    base = make_config(tmp_path, {"num_ranks": 1})
    without = dataclasses.replace(base, rollout=dataclasses.replace(base.rollout, entropy_source="rollout"))
    [(scores, _, _)] = run_processes(one_step, 1, base, make_rollouts(), timeout_s=60)
    exact = {"rollout_logprobs": scores.old_logprobs, "token_entropy": scores.token_entropy}
    rollouts = make_rollouts(**exact)
    [wanted] = run_processes(a_probe_after_a_step, 1, base, rollouts, rollouts, timeout_s=60)
    [found] = run_processes(a_probe_after_a_step, 1, without, rollouts, rollouts, timeout_s=60)
    assert wanted.worst
    assert [(token.row, token.position) for token in found.worst] == [(t.row, t.position) for t in wanted.worst]


def scored(rank, world_size, init_method, config, rollouts):
    from gtpo_megatron.actor.actor import MegatronActor

    actor = MegatronActor(config, global_rank=rank, init_method=init_method)
    replica, num = actor.coordinates.data_index, config.parallel.data_parallel_size
    metrics = actor.score_tokens(RolloutShard.of(rollouts, range(replica, 8, num)))
    report = actor.explain_gap(0.01)
    return (
        actor.coordinates.reports,
        {name: metric for name, metric in metrics.items() if name.startswith(PREFIX)},
        report,
    )


@pytest.mark.parametrize("layout", [{"num_ranks": 2}, {"num_ranks": 2, "pipeline_parallel_size": 2}])
def test_ranks_together_find_what_one_rank_finds(tmp_path, layout):
    make_model(tmp_path, tied=True)
    base = make_config(tmp_path, {"num_ranks": 1})
    rollouts = make_rollouts()
    [(_, alone, wanted)] = run_processes(scored, 1, base, rollouts, timeout_s=60)
    results = run_processes(scored, 2, make_config(tmp_path, layout), rollouts, timeout_s=60)
    together = to_scalars(merge([metrics for reports, metrics, _ in results if reports]))
    alone = to_scalars(alone)
    assert together.keys() == alone.keys()
    for name, value in alone.items():
        assert together[name] == pytest.approx(value, rel=0.03 if "_p" in name else 1e-4), name
    found = merge_gaps([report for reports, _, report in results if reports])
    assert [(token.row, token.position) for token in found.worst] == [(t.row, t.position) for t in wanted.worst]
    assert {row: number for row, (number, _) in found.by_row.items()} == {
        row: number for row, (number, _) in wanted.by_row.items()
    }


def test_dppo_is_anchored_to_the_sampler_with_and_without_a_scoring_pass(tmp_path):
    make_model(tmp_path, tied=True)
    base = make_config(tmp_path, {"num_ranks": 1}, algorithm=DPPOConfig(norm_tokens=12, divergence="kl", max_kl=1e-3))
    without = dataclasses.replace(base, rollout=dataclasses.replace(base.rollout, entropy_source="rollout"))
    [(scores, _, _)] = run_processes(one_step, 1, base, make_rollouts(), timeout_s=60)
    sampled = (scores.old_logprobs * 1.2).clamp(max=0)
    rollouts = make_rollouts(rollout_logprobs=sampled, token_entropy=scores.token_entropy)
    [(_, _, measured)] = run_processes(one_step, 1, base, rollouts, timeout_s=60)
    [(_, _, found)] = run_processes(one_step, 1, without, rollouts, timeout_s=60)
    assert 0 < measured["policy/clip_frac"] < 1
    assert measured["policy/ratio_mean"] > 1.1  # though this is the first update
    assert measured["policy/kl_old_nats"] == pytest.approx(0, abs=1e-6)
    for name in ("policy/loss", "policy/clip_frac", "policy/ratio_mean", "optimizer/grad_norm"):
        assert found[name] == pytest.approx(measured[name], rel=1e-4), name
