"""Which kinds of tokens have the credit, against a scalar loop and on a page."""

import random

import pytest

from gtpo_megatron.companions.report.page import write_report
from gtpo_megatron.companions.report.sampled_groups import MAX_TOKENS, TokenKind, sampled_groups
from gtpo_megatron.companions.report.token_classes import FIRST, KINDS, kind_of, kinds_of_tokens
from gtpo_megatron.run_folder.rollout_log import RolloutRecord
from tests.unit.companions.report.run_folders import ATTACK, make_run


@pytest.mark.parametrize(
    ("token", "kind"),
    [
        ("<|im_end|>", "special token"),
        ("<\uff5cend▁of▁sentence\uff5c>", "special token"),
        ("</think>", "special token"),
        ("\n\n", "line break"),
        ("12", "digits"),
        (" 3.5", "digits"),
        ("7,000", "digits"),
        (" +", "operator"),
        ("=", "operator"),
        ("->", "operator"),
        (".", "punctuation"),
        (' "', "punctuation"),
        (" However", "connective"),
        ("Wait", "connective"),
        (" so", "connective"),
        (" something", "beginning of a word"),
        ("The", "beginning of a word"),
        (" naïve", "beginning of a word"),
        ("ing", "rest of a word"),
        ("", "other"),
        ("   ", "other"),
    ],
)
def test_the_kind_of_a_token_is_told_by_its_text(token, kind):
    assert kind_of(token) == kind


def record(seed, *, reward):
    draw = random.Random(seed)
    tokens = [draw.choice(["12", " +", " so", "\n", " word", "ing", "."]) for _ in range(draw.randint(1, 9))]
    return RolloutRecord(
        group_id=0,
        policy_version=0,
        prompt="p",
        response="".join(tokens),
        tokens=tokens,
        token_entropy=[draw.random() for _ in tokens],
        shaped_rewards=[0.0] * len(tokens),
        advantages=[(1 if reward else -1) * draw.uniform(0.1, 2) for _ in tokens],
        reward=reward,
        truncated=False,
        foreign_spans=[(1, 2)] if seed % 3 == 0 and len(tokens) > 2 else (),
    )


def test_shares_entropies_and_credit_are_those_of_a_scalar_loop():
    records = [record(seed, reward=float(seed % 2)) for seed in range(40)]
    found = {one.kind: one for one in kinds_of_tokens(sampled_groups(1, records, threshold=0.5))}
    own = []
    for one in records:
        kept = [index for index in range(len(one.tokens)) if index not in one.foreign_tokens]
        for place, index in enumerate(kept):
            kind = FIRST if place == 0 else kind_of(one.tokens[index])
            own.append((kind, one.token_entropy[index], one.advantages[index], one.reward > 0.5))
    assert list(found) == [kind for kind in KINDS if kind in {row[0] for row in own}]
    for kind, got in found.items():
        rows = [row for row in own if row[0] == kind]
        assert got.count == len(rows)
        assert got.share == pytest.approx(len(rows) / len(own))
        assert got.entropy == pytest.approx(sum(row[1] for row in rows) / len(rows), rel=1e-2)
        for outcome, is_correct in ((TokenKind.CORRECT, True), (TokenKind.INCORRECT, False)):
            side = [row[2] for row in own if row[3] == is_correct]
            mine = [row[2] for row in rows if row[3] == is_correct]
            wanted = (sum(mine) / len(mine)) / (sum(side) / len(side)) if mine else None
            assert got.credit[outcome] == (None if wanted is None else pytest.approx(wanted, rel=1e-2))


def test_of_a_long_conversation_the_tokens_that_are_kept_have_their_own_entropies():
    num, spans = MAX_TOKENS + 500, [(100, 200), (MAX_TOKENS - 20, MAX_TOKENS + 30)]
    foreign = {index for span in spans for index in range(*span)}
    long = RolloutRecord(
        group_id=0,
        policy_version=0,
        prompt="p",
        response="",
        tokens=["12" if index % 2 else " word" for index in range(num)],
        token_entropy=[0.0 if index in foreign else 1.0 + index % 2 for index in range(num)],
        shaped_rewards=[0.0] * num,
        advantages=[1.0 + index % 2 for index in range(num)],
        reward=1.0,
        truncated=False,
        foreign_spans=spans,
    )
    found = {one.kind: one for one in kinds_of_tokens(sampled_groups(1, [long], threshold=0.5))}
    assert sum(one.count for one in found.values()) == MAX_TOKENS - 120
    assert (found["digits"].entropy, found["beginning of a word"].entropy) == (2.0, 1.0)
    assert found["digits"].credit[TokenKind.CORRECT] > 1 > found["beginning of a word"].credit[TokenKind.CORRECT]


def test_equal_credit_is_one_everywhere_and_no_credit_is_a_dash():
    tokens = ["12", " so", "."]
    alike = {"policy_version": 0, "prompt": "", "response": "", "truncated": False, "tokens": tokens}
    alike |= {"token_entropy": [0.5] * 3, "shaped_rewards": [1.0] * 3, "group_id": 0}
    records = [
        RolloutRecord(**alike, advantages=[0.7] * 3, reward=1.0),
        RolloutRecord(**alike, advantages=[0.0] * 3, reward=0.0),
    ]
    for one in kinds_of_tokens(sampled_groups(1, records, threshold=0.5)):
        assert one.credit == {TokenKind.CORRECT: pytest.approx(1.0), TokenKind.INCORRECT: None}


def test_without_sampled_responses_there_is_no_table(tmp_path):
    assert kinds_of_tokens([]) == []
    write_report([make_run(tmp_path / "run", responses=False)], tmp_path / "page.html")
    assert "Where the credit goes" not in (tmp_path / "page.html").read_text()


def test_a_page_has_a_table_a_run_and_shows_no_text_of_tokens(tmp_path):
    write_report([make_run(tmp_path / name) for name in ("one", "two")], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    section = page[page.index('<details id="tokens"') :].split("</details>")[0]
    assert section.count("<table") == 2
    assert ATTACK not in section
