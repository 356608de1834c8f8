import pytest

from gtpo_megatron.errors import DataError
from gtpo_megatron.observability.timers import StageTimers, duration


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_another_thread_may_ask_what_is_running():
    timers = StageTimers()
    assert timers.current == ""
    with timers.stage("step"):
        assert timers.current == "step"
        with timers.stage("update"):
            assert timers.current == "update"
        assert timers.current == "step"
    assert timers.current == ""


def test_seconds_add_up_by_stage_and_start_again_after_take(clock):
    timers = StageTimers(clock=clock)
    for seconds in (1.0, 2.0):
        with timers.stage("rollout"):
            clock.now += seconds
    assert timers.take() == {"timing/rollout_s": 3.0}
    assert timers.take() == {}


def test_an_outer_stage_includes_its_inner_ones(clock):
    timers = StageTimers(clock=clock)
    with timers.stage("step"):
        clock.now += 1.0
        with timers.stage("update"):
            clock.now += 2.0
    assert timers.take() == {"timing/step_s": 3.0, "timing/update_s": 2.0}


def test_a_stage_inside_itself_is_counted_once(clock):
    timers = StageTimers(clock=clock)
    with timers.stage("score"), timers.stage("score"):
        clock.now += 2.0
    assert timers.take() == {"timing/score_s": 2.0}


def test_a_stage_that_raises_is_timed_and_closed(clock):
    timers = StageTimers(clock=clock)

    def update():
        with timers.stage("update"):
            clock.now += 1.5
            raise RuntimeError

    with pytest.raises(RuntimeError):
        update()
    with timers.stage("update"):  # not taken for a stage inside itself
        clock.now += 1.0
    assert timers.take() == {"timing/update_s": 2.5}


def test_a_stage_still_running_is_counted_when_it_ends(clock):
    timers = StageTimers(clock=clock)
    with timers.stage("step"):
        clock.now += 1.0
        assert timers.take() == {}
        clock.now += 1.0
    assert timers.take() == {"timing/step_s": 2.0}


def test_listener_hears_the_stage_that_runs_now(clock):
    heard = []
    timers = StageTimers(heard.append, clock=clock)
    with timers.stage("step"), timers.stage("rollout"):
        pass
    assert heard == ["step", "rollout", "step"]


def test_a_stage_that_makes_no_metric_name_is_refused(clock):
    with pytest.raises(DataError, match="timing/Weight Sync_s"), StageTimers(clock=clock).stage("Weight Sync"):
        pass


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (59.6, "1:00"), (425, "7:05"), (11225, "3:07:05")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text
