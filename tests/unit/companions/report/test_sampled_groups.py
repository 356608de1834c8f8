import tracemalloc
from dataclasses import replace

import pytest

from gtpo_megatron.companions.report import sampled_groups as module
from gtpo_megatron.companions.report.packed import unpacked
from gtpo_megatron.companions.report.sampled_groups import MAX_TOKENS, TokenKind, read_groups, sampled_groups, spread
from gtpo_megatron.run_folder.rollout_log import RolloutLog, RolloutRecord
from tests.unit.companions.report.run_folders import response


def long_record(length, group_id=0, reward=1.0):
    return RolloutRecord(
        group_id=group_id, policy_version=0, prompt="p" * 9000, response="",
        tokens=[f" t{i % 500}" for i in range(length)], token_entropy=[i / 1000 for i in range(length)],
        shaped_rewards=[1.0] * length,
        advantages=[(-1.0) ** i * 0.25 for i in range(length)], reward=reward, truncated=False,
    )  # fmt: skip


def test_a_long_response_is_cut_and_its_means_are_whole():
    length = MAX_TOKENS + 501
    (group,) = sampled_groups(3, [long_record(length)] * 2, threshold=0.5, max_groups=64)
    first = group.responses[0]
    assert (group.step, len(group.prompt), first.length, len(unpacked(first.entropy))) == (3, 4001, length, MAX_TOKENS)
    assert len(first.tokens) == len(unpacked(first.shaped_rewards)) == len(unpacked(first.advantages)) == MAX_TOKENS
    assert first.mean_entropy == pytest.approx((length - 1) / 2000, abs=1e-4)
    assert first.mean_advantage == pytest.approx(0.25 / length, abs=1e-4)  # an odd length


def test_texts_are_kept_of_all_responses_and_groups_up_to_the_limit():
    failed = replace(response(0, 1.0), reward_failed=True)
    rows = [failed, response(0, 1.0), response(5, 0.0), response(0, 1.0), response(0, 1.0), response(9, 1.0), failed]
    first, second = sampled_groups(1, rows, threshold=0.5, max_groups=2)
    assert [each.kind for each in first.responses] == ["ungraded", "correct", "correct", "correct", "ungraded"]
    assert all(len(each.tokens) == 3 for each in first.responses)
    assert (second.group_id, [each.kind for each in second.responses]) == (5, [TokenKind.INCORRECT])


def test_parts_and_what_the_reward_said_are_cut_sooner_where_a_page_does_not_open_with_them():
    told = replace(response(0, 1.0), parts={f"p{i}": i / 3 for i in range(20)}, info="x" * 5000)
    (group,) = sampled_groups(1, [told] * 3, threshold=0.5, max_groups=1)
    first, _, third = group.responses
    assert (len(first.parts), first.parts["p1"]) == (12, 0.3333)
    assert len(first.info) == 1501
    assert len(third.info) == 301


def test_an_empty_response_has_no_means():
    empty = replace(response(0, 0.0), response="", tokens=(), token_entropy=(), shaped_rewards=(), advantages=())
    (group,) = sampled_groups(1, [empty], threshold=0.5, max_groups=1)
    assert (group.responses[0].mean_entropy, group.responses[0].length) == (0.0, 0)


def test_reading_long_responses_takes_the_memory_of_one(tmp_path):
    log = RolloutLog(tmp_path, groups_per_step=1)
    log.write(1, [long_record(6000)])
    line = (tmp_path / "rollouts" / "step_000001.jsonl").read_bytes()
    (tmp_path / "rollouts" / "step_000001.jsonl").write_bytes(line * 16)
    tracemalloc.start()
    try:
        groups, remark = read_groups(tmp_path, threshold=0.5)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (len(groups[0].responses), remark) == (16, "")
    assert peak < 6 << 20  # 16 whole records take three times as much


def test_a_page_that_follows_a_run_reads_few_files_again(tmp_path, monkeypatch):
    log = RolloutLog(tmp_path, groups_per_step=2)
    read = []
    monkeypatch.setattr(module, "iter_rollouts", lambda path: read.append(path) or original(path))
    for step in range(1, 151):
        log.write(step, [response(2 * step, 1.0), response(2 * step + 1, 0.0)])
        groups, _ = read_groups(tmp_path, threshold=0.5)
        assert groups[-1].step == step
    assert len(groups) == 64
    assert len(read) < 2.1 * 150
    read.clear()
    read_groups(tmp_path, threshold=0.5)
    assert read == []
    log.write(150, [response(7, 1.0)])  # once more, after a resume
    assert read_groups(tmp_path, threshold=0.5)[0][-1].group_id == 7
    assert len(read) == 1
    read.clear()
    assert read_groups(tmp_path, threshold=2.0)[0][-1].responses[0].kind == TokenKind.INCORRECT
    assert len(read) == 64


original = module.iter_rollouts


@pytest.mark.parametrize("length", [0, 1, 5, 31, 32, 100, 199])
def test_a_choice_is_spread_and_stays_when_the_list_grows(length):
    items = list(range(length))
    chosen = spread(items, 31)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(31, length)
    if length:
        assert chosen[0] == 0
        gaps = [b - a for a, b in zip(chosen, [*chosen[1:], length], strict=True)]
        assert max(gaps) <= 2 * max(1, -(-length // 31))
    grown = spread([*items, length], 31)
    assert len(set(grown) - set(chosen)) <= 1


def test_nothing_is_chosen_of_nothing():
    assert spread([1, 2, 3], 0) == []


def test_foreign_tokens_are_shown_and_have_no_numbers():
    """A tool's output between two tokens of the policy: positions and means count the policy's tokens alone."""
    mixed = RolloutRecord(
        group_id=0, policy_version=0, prompt="p", response="a<out>b", tokens=["a", "<", "out>", "b"],
        token_entropy=[0.5, 0.0, 0.0, 1.5], shaped_rewards=[1.0, 0.0, 0.0, 1.1], advantages=[0.25, 0.0, 0.0, 0.75],
        reward=1.0, truncated=False, foreign_spans=[(1, 3)],
    )  # fmt: skip
    (group,) = sampled_groups(1, [mixed, replace(mixed, foreign_spans=[(0, 4)])], threshold=0.5, max_groups=1)
    first, silent = group.responses
    assert (first.length, list(unpacked(first.entropy)), first.num_tokens) == (2, [0.5, 1.5], 4)
    assert (first.tokens, first.foreign) == (["a", "<", "out>", "b"], [1, 2])
    assert list(unpacked(first.advantages)) == [0.25, 0.75]
    assert (first.mean_entropy, first.mean_advantage) == (1, 0.5)
    assert (silent.length, silent.mean_entropy) == (0, 0.0)
