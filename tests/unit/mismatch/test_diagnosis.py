"""Shares at the edge of being named; what each looks like as a whole is in ``test_gap_report``."""

from gtpo_megatron.mismatch.gap_report import GapReport, looks_like

EACH_ONCE = dict.fromkeys(range(100), (1, 0.1))


def report(**parts):
    even = {
        "by_row": {0: (100, 10.0)},
        "by_position": {0: (100, 10.0)},
        "by_token": EACH_ONCE,
        "by_length": {5: (100, 10.0)},
    }
    return GapReport(worst=(), excess_below=5.0, **(even | parts))


def test_a_part_that_most_tokens_are_in_is_not_named():
    assert "positions 0 to 0" in looks_like(report(by_position={0: (49, 9.0), 3: (51, 1.0)}), engines=[0])
    assert "positions 0" not in looks_like(report(by_position={0: (60, 9.0), 3: (40, 1.0)}), engines=[0])


def test_a_part_with_too_little_of_the_excess_is_not_named():
    assert "positions 0" not in looks_like(report(by_position={0: (45, 7.0), 3: (55, 3.0)}), engines=[0])


def test_ids_that_were_met_once_each_say_nothing():
    tokens = {token: (1, 5.0 if token < 2 else 0.0) for token in range(100)}
    assert "token ids" not in looks_like(report(by_token=tokens), engines=[0])
    tokens = {token: (10, 5.0 if token == 1 else 0.5 / 9) for token in range(10)}
    assert "some token ids: 1 of 10 (1)" in looks_like(report(by_row={0: (100, 5.5)}, by_token=tokens), engines=[0])
