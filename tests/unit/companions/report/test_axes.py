"""The axes of a page: running sums, only those that every run has, and few of a long run's steps."""

import pytest

from gtpo_megatron.companions.report.page import MAX_KNOTS, axes, axis_switch
from gtpo_megatron.companions.report.run_data import RunData


def run_of(rows):
    return RunData(name="run", config={}, config_text="", metrics=rows, groups=(), remarks=())


def row(step, **more):
    return {"step": step, "timing/step_s": 2.0, "rollout/response_tokens_count": 100.0, **more}


def test_time_has_all_that_the_driver_does_and_tokens_are_counted_apart():
    rows = [
        {"step": 0, "timing/evaluation_s": 5.0},
        row(1, **{"rollout/trained_tokens_count": 60.0, "timing/push_check_s": 0.5}),
        row(2, **{"rollout/trained_tokens_count": None, "timing/checkpoint_s": 1.0}),
    ]
    found = axes([run_of(rows)])
    assert list(found["names"]) == ["step", "time", "sampled", "trained"]
    assert found["runs"] == [
        {"steps": [0, 1, 2], "time": [5, 7.5, 10.5], "sampled": [0, 100, 200], "trained": [0, 60, 60]}
    ]
    assert axis_switch(found).count("<input") == 4


def test_an_axis_that_one_run_lacks_is_not_offered():
    with_trained = run_of([row(1, **{"rollout/trained_tokens_count": 60.0})])
    assert list(axes([with_trained, run_of([row(1)])])["names"]) == ["step", "time", "sampled"]
    nothing = axes([run_of([{"step": 1, "rollout/reward_mean": 0.5}]), run_of([])])
    assert list(nothing["names"]) == ["step"]
    assert axis_switch(nothing) == ""


@pytest.mark.parametrize("num_runs", [1, 3])
def test_a_long_run_has_some_of_its_steps_with_both_ends(num_runs):
    rows = [row(step) for step in range(1, 10_001)]
    for table in axes([run_of(rows)] * num_runs)["runs"]:
        assert len(table["steps"]) <= MAX_KNOTS // num_runs + 2
        assert (table["steps"][0], table["steps"][-1], table["time"][-1]) == (1, 10_000, 20_000)
        assert table["time"] == [2 * step for step in table["steps"]]
