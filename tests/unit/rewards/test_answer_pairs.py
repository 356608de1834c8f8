"""Self-made pairs of answers: a reference against its rewritings is right, and against its neighbours wrong."""

import pytest

from tests.unit.rewards.answer_pairs import KINDS, PER_KIND, graded, pairs

FOUND = list(pairs())


def test_there_are_at_least_three_thousand():
    assert len(FOUND) == 2 * PER_KIND * len(KINDS) >= 3_000
    assert len({pair.kind for pair in FOUND}) == len(KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind.__name__ for kind in KINDS])
def test_of_a_kind_fewer_than_three_in_a_thousand_verdicts_are_wrong(kind):
    of_kind = [pair for pair in FOUND if pair.kind == kind]
    wrong = [pair for pair in of_kind if graded(pair) != pair.right]
    assert len(wrong) < 0.003 * len(of_kind), wrong
