"""Where the gaps are, by hand, whole and in shards."""

import math

import pytest
import torch

from gtpo_megatron.batch import RolloutBatch
from gtpo_megatron.mismatch.gap_report import NUM_WORST, gap_report, looks_like, merge_gaps


def batch(lengths=(6, 3, 8, 8), prompt=4):
    num, width = len(lengths), max(lengths)
    lengths = torch.tensor(lengths)
    mask = torch.arange(width) < lengths[:, None]
    return RolloutBatch(
        prompt_ids=torch.arange(prompt).repeat(num, 1) + 100,
        prompt_lengths=torch.full((num,), prompt),
        response_ids=torch.where(mask, torch.arange(num * width).view(num, width) + 1, 0),
        response_lengths=lengths,
        loss_mask=mask,
        rollout_logprobs=torch.where(mask, -1.0, 0.0),
        group_ids=torch.arange(num) // 2,
        truncated=torch.zeros(num, dtype=torch.bool),
        policy_version=7,
    )


def report(rollouts, gaps, engines=None):
    """Of trainer's log-probs that lie ``gaps`` below the sampler's."""
    rows = range(rollouts.num_responses)
    trainer = rollouts.rollout_logprobs - gaps
    whole = gap_report(rollouts, trainer, rows=rows, typical_nats=0.1)
    halves = [
        gap_report(half, trainer[picked][:, : half.response_ids.shape[1]], rows=picked, typical_nats=0.1)
        for picked in (list(rows)[0::2], list(rows)[1::2])
        for half in [rollouts.select(picked)]
    ]
    joined = merge_gaps(halves)
    assert repr(joined.worst) == repr(whole.worst)  # a NaN does not equal itself
    for name in ("by_row", "by_position", "by_token", "by_length"):
        ours, theirs = getattr(joined, name), getattr(whole, name)
        assert ours.keys() == theirs.keys()
        assert all(ours[key] == pytest.approx(theirs[key]) for key in ours)
    return whole, looks_like(whole, engines=engines or [0] * rollouts.num_responses)


def test_the_worst_tokens_come_first_with_their_context():
    rollouts, gaps = batch(), torch.zeros(4, 8)
    gaps[0, 5], gaps[2, 0], gaps[1, 1] = 0.5, math.nan, 2.0
    gaps[1, 7] = 9.0  # padding
    found, _ = report(rollouts, gaps)
    assert len(found.worst) == NUM_WORST
    first, second, third, fourth = found.worst[:4]
    assert (first.row, first.position, first.gap) == (2, 0, 1000.0)
    assert (first.before, first.after) == ((100, 101, 102, 103), (18, 19, 20, 21, 22, 23, 24))
    assert (second.row, second.position, second.token_id) == (1, 1, 10)
    assert (second.sampler_logprob, second.trainer_logprob) == (-1.0, -3.0)
    assert (second.before, second.after) == ((100, 101, 102, 103, 9), (11,))
    assert (second.prompt_length, second.response_length, second.policy_version, second.group_id) == (4, 3, 7, 0)
    assert (third.row, third.position) == (0, 5)
    assert fourth.gap == 0.0
    assert found.by_row[1] == (3, pytest.approx(1.9))
    assert found.by_position[0] == (4, pytest.approx(999.9))  # position 0 of four responses
    assert found.by_position[1] == (8, pytest.approx(1.9))  # 1 and 2
    assert found.by_length == {2: (3, pytest.approx(1.9)), 3: (22, pytest.approx(1000.3))}
    assert found.excess_below == pytest.approx(1002.2)


def test_a_rank_without_logits_adds_nothing():
    rollouts = batch()
    found = gap_report(rollouts, rollouts.rollout_logprobs, rows=range(4), typical_nats=0.1)
    assert merge_gaps([found, merge_gaps([])]) == found


LONG = batch((40, 64, 8, 8, 40, 64, 8, 8))


def test_what_it_looks_like():
    shape = LONG.response_ids.shape
    late, every = torch.zeros(shape), torch.ones(shape)
    late[:, 31:] = 1.0
    long = torch.zeros(14, 64)
    long[1] = 1.0
    assert "positions 31 to 62 of the responses" in report(LONG, late)[1]
    assert "sequences of 64 and more tokens" in report(batch((40, 64, *[8] * 12)), long)[1]
    assert report(LONG, every)[1].startswith("tokens of all kinds, at all positions; the trainer finds them less")
    assert report(LONG, -every)[1].endswith("more likely than the sampler did")
    assert report(LONG, torch.zeros(shape))[1] == "every token differs a little, none stands out"


def test_one_engine_is_named():
    gaps = torch.zeros(LONG.response_ids.shape)
    gaps[0::2] = 1.0
    engines = [0, 1] * 4
    assert report(LONG, gaps, engines)[1].startswith("the tokens of engine 0, one of 2")
    assert "engine" not in report(LONG, torch.ones_like(gaps), engines)[1]


def test_token_ids_are_named_if_they_return():
    rollouts = batch((64,) * 8)
    ids = rollouts.response_ids % 50
    rollouts = RolloutBatch(**{name: getattr(rollouts, name) for name in rollouts.__slots__} | {"response_ids": ids})
    found = report(rollouts, torch.isin(ids, torch.tensor([13, 17])).float() * 3)[1]
    assert found.startswith("some token ids: 2 of 50 (13, 17)") or found.startswith("some token ids: 2 of 50 (17, 13)")
