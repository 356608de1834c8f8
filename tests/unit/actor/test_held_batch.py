"""Who may work on the batch that a rank holds, and what a stage out of order is told."""

import pickle

import pytest
import torch

from gtpo_megatron.actor.held_batch import HeldBatch
from gtpo_megatron.batch import RolloutShard, ScoredBatch, TrainBatch
from gtpo_megatron.errors import StageOrderError

SCORED = ScoredBatch(
    shard=RolloutShard(rollouts=None, rows=(), prompt_groups=(), policy_version=0),
    scores=None,
)
TRAIN = TrainBatch(scored=SCORED, credit=None, loss_mask=torch.zeros(1, 1, dtype=torch.bool))


def after(*stages):
    """What is held when these were the stages so far."""
    held = HeldBatch()
    for stage in stages:
        if stage == "release_batch":
            held.release()
        else:
            held.keep(SCORED if stage in ("score_tokens", "use_sampler_scores") else TRAIN, stage=stage)
    return held


def test_stages_in_order_find_the_batch():
    assert after("score_tokens").scored("assign_credit") is SCORED
    assert after("use_sampler_scores").scored("assign_credit") is SCORED
    assert after("score_tokens", "assign_credit").credited("update") is TRAIN
    records = after("score_tokens", "assign_credit", "update")
    assert records.credited("sample_records", after=("assign_credit", "update")) is TRAIN
    assert after("score_tokens", "assign_credit", "update", "score_tokens").scored("assign_credit") is SCORED


@pytest.mark.parametrize(
    ("stages", "ask", "message"),
    [
        (
            (),
            "assign_credit",
            "assign_credit needs the batch that score_tokens or use_sampler_scores leaves, but nothing came",
        ),
        (("score_tokens", "assign_credit"), "assign_credit", "but assign_credit came before it"),
        (("score_tokens", "release_batch"), "assign_credit", "but release_batch came before it"),
        ((), "update", "update needs the batch that assign_credit leaves, but nothing came before it"),
        (("score_tokens",), "update", "but score_tokens came before it"),
        (("score_tokens", "assign_credit", "update"), "update", "but update came before it"),  # off policy, unseen
        (("score_tokens", "assign_credit", "update", "release_batch"), "update", "but release_batch came before it"),
        (
            ("score_tokens", "assign_credit", "update", "use_sampler_scores"),
            "update",
            "but use_sampler_scores came before it",
        ),
    ],
)
def test_a_stage_out_of_order_is_told_what_came_before(stages, ask, message):
    held = after(*stages)
    with pytest.raises(StageOrderError, match=message) as caught:
        held.scored(ask) if ask == "assign_credit" else held.credited(ask)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_nothing_is_held_after_a_release():
    held = after("score_tokens", "assign_credit", "update", "release_batch")
    assert held.batch is None
