"""How often to save and what is left of the time, against a simulated run that fails by chance."""

import random
import statistics

import pytest

from gtpo_megatron.companions.goodput.failures import (
    GPU_HOURS_BETWEEN_FAILURES,
    HOUR,
    Failures,
    failures_of,
)


def test_the_published_rate():
    """419 interruptions in 54 days on 16,384 GPUs: one in three hours."""
    found = failures_of(16384, num_parameters=405e9, snapshot_s=10.0, in_background=True)
    assert found.mtbf / HOUR == pytest.approx(54 * 24 / 419, rel=1e-9)
    assert found.mtbf / HOUR == pytest.approx(3.09, abs=0.01)
    assert pytest.approx(50_677, rel=1e-3) == GPU_HOURS_BETWEEN_FAILURES


def trained_share(failures, interval, *, days, seed):
    """Seconds of training that were not done again, over all seconds, of a run that is struck at random."""
    chance, now, trained = random.Random(seed), 0.0, 0.0
    strikes = chance.expovariate(1 / failures.mtbf)
    while now < days * 86400:
        done = now + interval + failures.held_up
        if done <= strikes:
            now, trained = done, trained + interval
            continue
        now = strikes  # what was trained since the last save is lost, and a restart may be struck too
        while True:
            strikes = now + chance.expovariate(1 / failures.mtbf)
            now += failures.restart
            if now <= strikes:
                break
            now = strikes
    return trained / now


@pytest.mark.parametrize("interval", [300.0, 1200.0, 5000.0])
def test_goodput_is_that_of_a_run_that_is_struck_at_random(interval):
    failures = Failures(mtbf=2 * HOUR, held_up=20.0, restart=400.0)
    found = statistics.mean(trained_share(failures, interval, days=200, seed=seed) for seed in range(4))
    assert failures.goodput(interval) == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize(("mtbf", "held_up"), [(3 * HOUR, 5.0), (50 * HOUR, 5.0), (2 * HOUR, 120.0)])
def test_no_other_interval_is_better(mtbf, held_up):
    failures = Failures(mtbf=mtbf, held_up=held_up, restart=400.0)
    best = failures.best_interval()
    assert failures.goodput(best) >= max(failures.goodput(best * factor) for factor in (0.8, 0.95, 1.05, 1.25))


def test_a_save_that_waits_for_the_disk_holds_up_longer_and_is_made_less_often():
    behind, waiting = (
        failures_of(1024, num_parameters=32e9, snapshot_s=5.0, in_background=in_background)
        for in_background in (True, False)
    )
    assert waiting.held_up == pytest.approx(behind.held_up + 32e9 * 14 / 10e9)
    assert waiting.best_interval() > 2 * behind.best_interval()
    assert waiting.goodput(waiting.best_interval()) < behind.goodput(behind.best_interval())


def test_where_saving_takes_as_long_as_failures_are_apart_nothing_helps():
    failures = Failures(mtbf=100.0, held_up=500.0, restart=10.0)
    assert failures.best_interval() == 100.0
    assert 0 < failures.goodput(100.0) < 0.01


def test_failures_that_let_nothing_be_finished_leave_nothing():
    hopeless = Failures(mtbf=1e-6, held_up=3.0, restart=300.0)
    assert hopeless.goodput(hopeless.best_interval()) == 0.0
