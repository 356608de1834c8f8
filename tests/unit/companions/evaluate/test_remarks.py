"""What an evaluation says below its table of responses that count as 0 without having been graded."""

from gtpo_megatron.companions.evaluate.remarks import remarks
from tests.unit.companions.evaluate.makers import graded


def test_graded_responses_need_no_remark():
    parts = {"requests_refused": 0.0, "ended_ungraded": 0.0, "turns": 2.0}
    assert remarks([]) == []
    assert remarks([graded("x-0", 0, parts=parts), graded("x-0", 1)]) == []


def test_what_counts_as_wrong_without_a_verdict_is_said_with_its_commonest_reason():
    failures = ["late", "reset raised", "late", None]
    found = remarks([graded("x-0", place, failure=failure) for place, failure in enumerate(failures)])
    assert found == ["3 of 4 responses have no verdict and count as wrong; 2 x late"]


def test_episodes_that_a_limit_ended_and_requests_that_were_refused_are_counted():
    refused = {"requests_refused": 2.0, "ended_ungraded": 1.0}
    found = remarks(
        [
            graded("x-0", 0, parts={"requests_refused": 0.0, "ended_ungraded": 1.0}),
            graded("x-0", 1, parts=refused | {"ended_ungraded": 0.0}, info='{"refused": "n=2: no"}'),
            graded("x-1", 0, parts=refused, failure="its request was refused: n=3"),
        ]
    )
    assert found[1:] == [
        "1 of 3 episodes were ended by a limit before they were graded, and have reward 0",
        "4 requests of agents were refused, in 2 of 3 episodes; the first: n=2: no",
    ]
    (_, said) = remarks([graded("x-1", 0, parts=refused, failure="its request was refused: n=3")])
    assert said.endswith("in 1 of 1 episodes; the first: its request was refused: n=3")
