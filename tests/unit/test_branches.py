"""Rows with branches against the trees of turns that they stand for."""

import re

import pytest
import torch

from gtpo_megatron.algorithms import assign_credit
from gtpo_megatron.algorithms.token_batch import CreditBatch, ResponseTable, own_lengths, table_rows
from gtpo_megatron.batch import take_rows
from gtpo_megatron.branches import NOTHING, Branch, Path, check_within, paths
from gtpo_megatron.config.algorithm import GTPOConfig
from gtpo_megatron.config.algorithm.base import SoftOverlongPenalty
from gtpo_megatron.data.packing import PackLayout, micro_batches
from gtpo_megatron.errors import ShapeError
from tests.reference.credit import Rules, gtpo
from tests.unit.branching import batch_of, random_episode

EPISODES = [random_episode(seed) for seed in range(60)]


def test_a_response_without_branches_is_one_sequence():
    assert paths(5) == (Path(has_prompt=True, stretches=((0, 5),), num_known=0),)
    assert paths(0) == (Path(has_prompt=True, stretches=(), num_known=0),)


def test_by_hand():
    """``a b | c`` after the prompt alone ``| d`` after b ``| e`` of its own prompt, and ``f`` goes on with it."""
    branches = (Branch(2, 0), Branch(3, 2), Branch(4, NOTHING))
    assert paths(6, branches) == (
        Path(has_prompt=True, stretches=((2, 3),), num_known=0),
        Path(has_prompt=True, stretches=((0, 2), (3, 4)), num_known=0),
        Path(has_prompt=False, stretches=((4, 6),), num_known=0),
    )
    assert paths(5, (Branch(3, 1), Branch(4, 1)))[2].new_stretches == ((4, 5),)


def test_every_sequence_is_a_path_of_the_tree_and_every_token_is_new_in_one():
    for episode in EPISODES:
        seen = []
        for path in paths(len(episode.row), episode.branches):
            places = [place for first, last in path.stretches for place in range(first, last)]
            new = [place for first, last in path.new_stretches for place in range(first, last)]
            assert new == places[path.num_known :]
            assert not set(new) & set(seen)
            assert set(places[: path.num_known]) <= set(seen)
            seen += new
            last = episode.turn_of(episode.row[places[-1]])
            found = [(episode.row[place], episode.is_own[place]) for place in places]
            prompt = [(token, False) for token in episode.prompt] if path.has_prompt else []
            assert prompt + found == episode.sequence(last)
        assert sorted(seen) == list(range(len(episode.row)))


@pytest.mark.parametrize("are_together", [False, True])
@pytest.mark.parametrize("budget", [8, 40])
def test_every_token_is_scored_once_behind_what_it_was_sampled_after(budget, are_together):
    batch = batch_of(EPISODES)
    layout = PackLayout(document_multiple=2, multiple=4)
    micros = micro_batches(batch, range(60), budget_tokens=budget, layout=layout, are_together=are_together)
    scored = []
    for micro in micros:
        for target, position, row, column in zip(
            micro.target_ids.tolist(),
            micro.score_positions.tolist(),
            micro.token_rows.tolist(),
            micro.token_columns.tolist(),
            strict=True,
        ):
            episode = EPISODES[micro.rows[row]]
            assert episode.row[column] == target
            start = max(start for start in micro.cu_seqlens.tolist()[:-1] if start <= position)
            read = micro.input_ids[start : position + 1].tolist()
            sequence = [token for token, _ in episode.sequence(episode.turn_of(target))]
            assert read == sequence[: sequence.index(target)]
            assert micro.position_ids[position] == len(read) - 1
            scored.append(target)
        assert len(micro.cu_seqlens) == len(micro.sequences) + 1
        assert are_together or len(micro.sequences) == 1 or int(micro.cu_seqlens[-1]) <= budget + 3
    assert sorted(scored) == sorted(token for one in EPISODES for token in (t for turn in one.turns for t in turn.own))
    if are_together:
        rows = [row for micro in micros for row in micro.rows]
        assert sorted(rows) == list(range(60))
    total = int(batch.sequence_tokens.sum())
    assert total == sum(len(one) for micro in micros for one in (micro.input_ids[~micro.is_padding],))


@pytest.mark.parametrize("are_together", [False, True])
@pytest.mark.parametrize("budget", [8, 40, 1000])
def test_what_branches_have_in_common_is_packed_once(budget, are_together):
    batch = batch_of(EPISODES)
    layout = PackLayout(min_prefix_tokens=1)
    micros = micro_batches(batch, range(60), budget_tokens=budget, layout=layout, are_together=are_together)
    scored = []
    for micro in micros:
        bounds, paths_of = micro.cu_seqlens.tolist(), []
        for stretches, start, end in zip(micro.prefixes, bounds, bounds[1:], strict=False):
            places = [place for first, last in (*stretches, (start, end)) for place in range(first, last)]
            assert micro.position_ids[places].tolist() == list(range(len(places)))
            paths_of.append(micro.input_ids[places].tolist())
        for target, row in zip(micro.target_ids.tolist(), micro.token_rows.tolist(), strict=True):
            episode = EPISODES[micro.rows[row]]
            sequence = [token for token, _ in episode.sequence(episode.turn_of(target))]
            assert any(path[: len(sequence)] == sequence for path in paths_of)
            scored.append(target)
        if are_together or budget == 1000:
            # a micro-batch has every token of a row once, prompts included
            assert len(set(micro.input_ids.tolist())) == len(micro.input_ids)
    assert sorted(scored) == sorted(token for one in EPISODES for token in (t for turn in one.turns for t in turn.own))


def credit_batch(batch):
    lengths = own_lengths(batch.loss_mask)
    rows = table_rows(torch.zeros(len(lengths)), batch.group_ids, lengths, success_threshold=0.5)
    table = ResponseTable.of(rows, slice(0, len(lengths)))
    return CreditBatch.of(batch.loss_mask, table, entropy=torch.zeros(int(lengths.sum())), branches=batch.branches)


def test_positions_and_turns_count_along_the_path():
    batch = batch_of(EPISODES)
    found = credit_batch(batch)
    own = [(one, token) for one in EPISODES for token, mine in zip(one.row, one.is_own, strict=True) if mine]
    assert found.position.tolist() == [one.own_before(token) for one, token in own]
    turns = found.turns()
    assert turns.depth.tolist() == [one.depth(token) for one, token in own]
    assert turns.number.tolist() == [one.turns.index(one.turn_of(token)) for one, token in own]
    assert turns.place.tolist() == [one.turn_of(token).own.index(token) for one, token in own]


@pytest.mark.parametrize("axis", ["position", "turn", "response", "matrix"])
@pytest.mark.parametrize("with_shaped", [False, True])
def test_gtpo_is_what_the_scalar_loops_say(axis, with_shaped):
    episodes = EPISODES[:16]
    batch = batch_of(episodes)
    draw = torch.Generator().manual_seed(0)
    entropy = torch.rand(batch.response_ids.shape, generator=draw).double() * batch.loss_mask
    shaped = torch.rand(entropy.shape, generator=draw) < 0.8
    rewards = (torch.arange(16) % 3 == 0).double()
    own = [[place for place, mine in enumerate(one.is_own) if mine] for one in episodes]
    told = [[(one, one.row[place]) for place in places] for one, places in zip(episodes, own, strict=True)]
    rules = Rules(
        axis=axis,
        positions=[[one.own_before(token) for one, token in row] for row in told],
        depths=[[one.depth(token) for one, token in row] for row in told],
        turns=[[one.turns.index(one.turn_of(token)) for one, token in row] for row in told],
        turn_rewards=[[float(index) for index in range(len(one.turns))] for one in episodes],
        turn_coef=0.01,
        kept=[[bool(shaped[i, place]) for place in places] for i, places in enumerate(own)] if with_shaped else None,
    )
    found = assign_credit(
        GTPOConfig(alpha1=1.0, alpha2=0.1, entropy_axis=axis, turn_reward_coef=0.01),
        rewards=rewards,
        token_entropy=entropy,
        response_mask=batch.loss_mask,
        group_ids=batch.group_ids,
        shaped_tokens=shaped if with_shaped else None,
        turn_rewards=rules.turn_rewards,
        branches=batch.branches,
    )
    entropies = [[float(entropy[i, place]) for place in places] for i, places in enumerate(own)]
    wanted, advantages = gtpo(entropies, rewards.tolist(), batch.group_ids.tolist(), rules)
    assert found.shaped_rewards[batch.loss_mask].tolist() == pytest.approx([r for row in wanted for r in row], rel=1e-6)
    assert found.advantages[batch.loss_mask].tolist() == pytest.approx(
        [a for row in advantages for a in row], rel=1e-5, abs=1e-6
    )


def test_a_length_penalty_hears_of_the_longest_path():
    """Two answers of 40 tokens to one prompt are none of 80."""
    penalty = SoftOverlongPenalty(max_tokens=100, buffer_tokens=40)
    config = GTPOConfig(length_penalty=penalty)
    found = [
        assign_credit(
            config,
            rewards=torch.tensor([1.0, 0.0]),
            token_entropy=torch.ones(2, 80),
            response_mask=torch.ones(2, 80, dtype=torch.bool),
            group_ids=torch.zeros(2, dtype=torch.int64),
            branches=branches,
        ).shaped_rewards[0, 0]
        for branches in (None, [[Branch(40, 0)], []])
    ]
    assert found[1] - found[0] == pytest.approx(0.5)


def test_rows_keep_their_branches_where_they_are_gathered():
    batch = batch_of(EPISODES[:8])
    assert batch.select([5, 2]).branches == (batch.branches[5], batch.branches[2])
    plain = batch_of([random_episode(0, max_turns=1)])
    assert take_rows([plain, batch], [(0, 0), (1, 3)]).branches == ((), batch.branches[3])
    assert take_rows([plain], [(0, 0)]).branches in ((), ((),))


@pytest.mark.parametrize("branches", [[(0, 0)], [(3, 4)], [(5, 1)], [(3, 1), (3, 0)], [(2, -2)]])
def test_branches_outside_the_response_are_refused(branches):
    with pytest.raises(ShapeError, match=re.escape(f"branches {branches} of a response of 5 tokens")):
        check_within([Branch(*one) for one in branches], 5)
