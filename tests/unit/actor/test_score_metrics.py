"""Metrics of scores against their formulas in plain loops; what the policy did not write counts for nothing."""

import dataclasses
import math

import pytest
import torch

from gtpo_megatron.actor.score_metrics import entropy_metrics, score_metrics
from gtpo_megatron.batch import RolloutBatch, ScoredBatch
from gtpo_megatron.observability.metrics import to_scalars

OLD = [[-0.5, -1.0, -9.0], [-2.0, -0.25, -9.0]]
SAMPLER = [[-0.75, -1.0, -1.0], [-1.5, -0.25, -1.0]]
REFERENCE = [[-1.0, -0.5, -3.0], [-2.0, -1.25, -3.0]]
ENTROPY = [[1.0, 0.5, 7.0], [2.0, 0.25, 7.0]]
OWN = [(0, 0), (0, 1), (1, 0), (1, 1)]


def scored(reference=None):
    """Two responses, the last token of each not the policy's."""
    mask = torch.tensor([[True, True, False]] * 2)
    rollouts = RolloutBatch(
        prompt_ids=torch.ones(2, 1, dtype=torch.int64),
        prompt_lengths=torch.tensor([1, 1]),
        response_ids=torch.ones(2, 3, dtype=torch.int64),
        response_lengths=torch.tensor([3, 3]),
        loss_mask=mask,
        rollout_logprobs=torch.tensor(SAMPLER),
        group_ids=torch.tensor([0, 0]),
        truncated=torch.tensor([False, False]),
        policy_version=0,
    )
    return ScoredBatch(
        rollouts=rollouts,
        global_rows=(0, 1),
        prompt_groups=(0,),
        policy_version=0,
        old_logprobs=torch.tensor(OLD),
        token_entropy=torch.tensor(ENTROPY),
        ref_logprobs=None if reference is None else torch.tensor(reference),
        scored_version=0,
    )


def test_entropy_and_divergence_are_means_over_the_own_tokens():
    found = to_scalars(entropy_metrics(scored(REFERENCE)))
    differences = [OLD[row][column] - REFERENCE[row][column] for row, column in OWN]
    k3 = [math.exp(-d) - 1 + d for d in differences]
    assert found == pytest.approx({
        "policy/entropy_nats": sum(ENTROPY[row][column] for row, column in OWN) / len(OWN),
        "policy/kl_ref_nats": sum(k3) / len(k3),
    })  # fmt: skip


def test_the_divergence_from_a_teacher_is_the_mean_difference():
    batch = dataclasses.replace(scored(), teacher_logprobs=torch.tensor(REFERENCE))
    differences = [OLD[row][column] - REFERENCE[row][column] for row, column in OWN]
    assert to_scalars(entropy_metrics(batch))["policy/kl_teacher_nats"] == pytest.approx(sum(differences) / len(OWN))


def test_without_a_reference_there_is_no_divergence():
    assert set(entropy_metrics(scored())) == {"policy/entropy_nats"}


def test_gaps_are_of_the_own_tokens():
    found = to_scalars(score_metrics(scored()))
    gaps = [abs(OLD[row][column] - SAMPLER[row][column]) for row, column in OWN]
    assert found["sync/logprob_gap_max"] == max(gaps)
    assert found["sync/logprob_gap_mean"] == pytest.approx(sum(gaps) / len(gaps))
    assert found["policy/entropy_nats"] == pytest.approx(3.75 / 4)
