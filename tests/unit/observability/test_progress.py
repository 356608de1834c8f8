import io
import math
import re

import pytest
from rich.console import Console

from gtpo_megatron.observability.progress import TrainingDisplay, trend

SCALARS = {
    "rollout/reward_mean": 0.5,
    "policy/entropy_nats": 0.731,
    "rollout/response_length_tokens": 83.25,
    "throughput/tokens_per_s": 2345.6,
    "sync/logprob_gap_p99": 3.2e-5,
    "eval/heldout_mean_at_k": 0.312,
    "eval/heldout_interval_low": 0.29,
    "eval/heldout_interval_high": 0.33,
    "timing/step_s": 6.0,
    "timing/rollout_s": 3.5,
    "timing/update_s": 2.25,
    "timing/credit_s": 0.001,
}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def display(stream, *, is_live=None, width=110, **settings):
    console = Console(file=stream, width=width, force_terminal=True if is_live else None, color_system=None)
    clock = Clock()
    return TrainingDisplay(num_steps=10, title="gtpo", console=console, is_live=is_live, clock=clock, **settings), clock


def test_without_a_terminal_each_step_is_one_plain_line_with_everything():
    stream = io.StringIO()
    shown, clock = display(stream, width=40)  # narrower than the line, which must not be wrapped
    with shown:
        shown.stage("rollout")
        clock.now += 6.0
        shown.step_done(1, SCALARS)
        shown.note("checkpoint of step 1 written")
        clock.now += 4.0
        shown.step_done(2, {"rollout/reward_mean": math.nan})
    lines = stream.getvalue().splitlines()
    assert lines == [
        "gtpo: steps 1 to 10",
        "step 1/10 · reward 0.500 · held-out 31.2% [29.0, 33.0] · entropy 0.731 nats · length 83.2 tokens · "
        "speed 2,346 tokens/s · log-prob gap 3.2e-05 nats · 6.0 s (rollout 3.5, update 2.2, rest 0.2) · left 54s",
        "checkpoint of step 1 written",
        "step 2/10 · reward nan · left 40s",
        "gtpo: stopped early after step 2, 10s",
    ]


def test_time_left_follows_the_last_steps_and_ignores_those_before_a_resume():
    shown, clock = display(io.StringIO(), first_step=4)
    with shown:
        assert shown.seconds_left is None
        clock.now += 100.0
        shown.step_done(4, {})  # an evaluation before the first step of this run is no step
        assert shown.seconds_left is None
        clock.now += 5.0
        shown.step_done(5, {})
        assert shown.seconds_left == 25.0
        for step in range(6, 11):
            clock.now += 3.0
            shown.step_done(step, {})
        assert shown.seconds_left == 0.0


def test_the_last_line_says_how_it_ended():
    stream = io.StringIO()
    shown, clock = display(stream)

    def crash():
        with shown:
            shown.stage("update")
            clock.now += 65.0
            raise KeyError("rank 1")

    with pytest.raises(KeyError):
        crash()
    assert stream.getvalue().splitlines()[-1] == "gtpo: stopped in update by KeyError after step 0, 1:05"
    stream = io.StringIO()
    shown, clock = display(stream, first_step=9)
    with shown:
        shown.step_done(10, {})
    assert stream.getvalue().splitlines()[-1] == "gtpo: finished after step 10, 0s"


def _frame(shown, width):
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None, force_terminal=True).print(shown._panel())
    return stream.getvalue()


@pytest.mark.parametrize("width", [110, 60])
def test_the_panel_shows_step_numbers_stage_and_time_left(width):
    shown, clock = display(io.StringIO(), is_live=True, width=width)
    with shown:
        shown.step_done(0, {"eval/heldout_mean_at_k": 0.25})
        for step in (1, 2):
            clock.now += 60.0
            shown.step_done(step, SCALARS | {"rollout/reward_mean": 0.1 * step})
        shown.stage("weight_sync")
        clock.now += 3.0
        frame = _frame(shown, width)
        assert all(len(line) <= width for line in frame.splitlines())
        for text in ("gtpo", "step 2/10", "2:03 + 8:00 left", "now weight_sync  3s", "0.200", "▁█", "0.731 nats"):
            assert text in frame
        for text in ("31.2% [29.0, 33.0]", "from 25.0%", "83.2 tokens", "2,346 tokens/s", "3.2e-05 nats"):
            assert text in frame
    assert "stopped early" in _frame(shown, width)


def sets(**means):
    return {f"eval/{label}_mean_at_k": mean for label, mean in means.items()}


@pytest.mark.parametrize(
    ("measured", "shown"),
    [
        (sets(aime24=0.25), ["aime24 25.0%"]),
        (sets(math500=0.5, aime24=0.25), ["math500 50.0%", "mean of 2 sets 37.5%"]),
        (sets(aime24=0.25, heldout=0.75), ["held-out 75.0%"]),
        (sets(aime24=0.25, heldout=0.75, math500=0.5), ["held-out 75.0%", "mean of 2 sets 37.5%"]),
    ],
)
def test_accuracy_goes_by_the_name_of_the_first_set_that_was_measured(measured, shown):
    stream = io.StringIO()
    plain, _ = display(stream)
    with plain:
        plain.step_done(0, measured)
        plain.step_done(1, {"rollout/reward_mean": 0.5})
    assert stream.getvalue().splitlines()[1:3] == [
        " · ".join(["step 0/10", *shown]), "step 1/10 · reward 0.500 · left 0s",
    ]  # fmt: skip
    live, _ = display(io.StringIO(), is_live=True)
    assert re.search(r"accuracy +-", _frame(live, 110))
    with live:
        live.step_done(0, measured)
        live.step_done(1, {"rollout/reward_mean": 0.5})
        frame = re.sub(" +", " ", _frame(live, 110))
    assert all(text in frame for text in shown)
    assert "accuracy" not in frame


def test_the_first_set_and_the_mean_of_all_have_intervals():
    """Those of independent sets: 0.05 and 0.12 below, 0.05 and 0 above make 0.13 / 2 and 0.05 / 2."""
    bounds = {"aime24": (0.2, 0.3), "aime25": (0.38, 0.5), "heldout": (0.0, 1.0)}
    ends = {
        f"eval/{label}_interval_{end}": pair[end == "high"] for label, pair in bounds.items() for end in ("low", "high")
    }
    measured = sets(aime24=0.25, aime25=0.5) | ends
    stream = io.StringIO()
    plain, _ = display(stream)
    with plain:
        plain.step_done(0, measured)
    assert "aime24 25.0% [20.0, 30.0] · mean of 2 sets 37.5% [31.0, 40.0]\n" in stream.getvalue()
    del measured["eval/aime25_interval_low"]
    with plain:
        plain.step_done(1, measured)
    assert stream.getvalue().count("mean of 2 sets 37.5% · ") == 1


def test_a_nan_is_an_alarm():
    shown, _ = display(io.StringIO(), is_live=True)
    with shown:
        shown.step_done(1, SCALARS | {"policy/entropy_nats": math.nan})
    stream = io.StringIO()
    Console(file=stream, width=110, color_system="standard", force_terminal=True).print(shown._panel())
    frame = stream.getvalue()
    assert "\x1b[1;31mnan" in frame
    assert "\x1b[1;31m0.500" not in frame


def test_notes_stay_above_the_panel():
    stream = io.StringIO()
    shown, _ = display(stream, is_live=True)
    with shown:
        shown.note("[rank 0] saved")  # brackets are text, not markup
    text = stream.getvalue()
    assert text.index("[rank 0] saved") < text.rindex("stopped early")


@pytest.mark.parametrize(
    ("values", "width", "text"),
    [
        ([0, 1], 8, "▁█"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([0, 2, 9, 11], 2, "▁█"),
        ([3.0, 3.0], 8, "▄▄"),
        ([0, math.nan, 7], 8, "▁ █"),
        ([math.nan], 8, " "),
        ([], 8, ""),
    ],
)
def test_trend(values, width, text):
    assert trend(values, width) == text


def test_the_start_names_what_it_does_once_and_how_far_it_is():
    stream = io.StringIO()
    plain, clock = display(stream)
    with plain:
        plain.starting("starting Ray")
        clock.now += 4.0
        for num in (0, 1, 2):
            plain.starting("loading", f"ranks {num} of 2")
        clock.now += 61.0
        plain.starting("step 0: measuring 256 problems x 8 before training")
        plain.stage("evaluation")
        plain.starting("")
    assert stream.getvalue().splitlines()[1:-1] == [
        "gtpo: starting Ray, 0s",
        "gtpo: loading, 4s",
        "gtpo: step 0: measuring 256 problems x 8 before training, 1:05",
    ]


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_panel_of_a_start(width):
    live, clock = display(io.StringIO(), is_live=True, width=width)
    assert "now starting  0s" in _frame(live, width)
    with live:
        live.starting("loading", "ranks 0 of 2 · engines 0 of 1 · graders 0 of 1")
        clock.now += 5.0
        live.starting("loading", "ranks 1 of 2 · engines 0 of 1 · graders 1 of 1")
        clock.now += 7.0
        assert "now loading · ranks 1 of 2 · engines 0 of 1 · graders 1 of 1  12s" in _frame(live, width)
        live.starting("step 0: measuring 256 problems x 8 before training")
        live.stage("evaluation")
        assert "now step 0: measuring 256 problems x 8 before training · evaluation  0s" in _frame(live, width)
        live.starting("")
        live.stage("rollout")
        assert "now rollout  0s" in _frame(live, width)


def test_a_failure_in_the_start_says_in_what():
    stream = io.StringIO()
    shown, _ = display(stream)

    def fail():
        with shown:
            shown.starting("connecting ranks and engines for pushes")
            raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        fail()
    assert "stopped in connecting ranks and engines for pushes by ConnectionResetError" in stream.getvalue()


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        (
            {"evaluation": 7.2, "push_check": 2.8},
            "6.0 s (rollout 3.5, update 2.2, rest 0.2) + push_check 2.8 + evaluation 7.2",
        ),
        ({"actor_forward_backward": 2.0, "environment": 3.0}, "6.0 s (rollout 3.5, update 2.2, rest 0.2)"),
        ({"rollout_wait": 1.0}, "6.0 s (update 2.2, rollout_wait 1.0, rest 2.8)"),
    ],
)
def test_the_parts_of_a_step_add_up_to_it(more, shown):
    stream = io.StringIO()
    display_, _ = display(stream)
    with display_:
        display_.step_done(1, SCALARS | {f"timing/{name}_s": seconds for name, seconds in more.items()})
    assert f"nats · {shown}" in stream.getvalue()


@pytest.mark.parametrize(("width", "columns", "more"), [(80, 1, False), (120, 2, False), (200, 3, True)])
def test_a_wide_terminal_is_used_whole(width, columns, more):
    shown, _ = display(io.StringIO(), is_live=True, width=width)
    with shown:
        for step in range(1, 50):
            shown.step_done(step, SCALARS | {"rollout/reward_mean": step / 50, "optimizer/grad_norm": 0.25})
        lines = _frame(shown, width).splitlines()
    assert {len(line) for line in lines} == {width}
    first = next(line for line in lines if "reward" in line)
    assert sum(label in first for label in ("reward", "held-out", "entropy")) == columns
    assert any("grad norm" in line for line in lines) == more
    assert len(re.search("[▁-█]+", first)[0]) > 16
    assert any("last step 6.0 s (rollout 3.5, update 2.2, rest 0.2)" in line for line in lines)
