"""Slurm's notations of time, and limits that leave no room."""

import pytest

from gtpo_megatron.errors import ConfigError
from launchers.walltime import EvaluationTime, check_room, to_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("10:30", 630),
        ("04:00:00", 14400),
        ("2-0", 172800),
        ("1-02:30", 86400 + 2 * 3600 + 1800),
        ("1-00:00:10", 86410),
    ],
)
def test_every_notation(text, seconds):
    assert to_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "0", "-5", "1:2:3:4", "00:00:00", "4h"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ConfigError, match="--time"):
        to_seconds(text)


@pytest.mark.parametrize(
    ("text", "stop_before_s", "step_s", "message"),
    [
        ("10", 600, 0, r"--time 10 is 600 s.*600 s before that.*less than 60 s to start"),
        ("04:00:00", 300, 400, r"--stop-before-s 300 is shorter than a step, 400 s \(measured\).*at least 800"),
        ("5", 200, 290, "shorter than a step"),
        ("5", 240, 245, "shorter than a step"),
        ("10", 500, 560, "shorter than a step"),
    ],
)
def test_a_limit_without_room_for_a_step_is_refused(text, stop_before_s, step_s, message):
    with pytest.raises(ConfigError, match=message):
        check_room(text, stop_before_s=stop_before_s, step_s=step_s, source="measured")


def test_a_limit_with_room_is_fine():
    check_room("04:00:00", stop_before_s=900, step_s=86, source="estimate")
    check_room("5", stop_before_s=60, step_s=0, source="")


SETS = EvaluationTime(by_set={"aime24": 100.0, "math500": 1900.0, "amc23": 1000.0}, source="estimate")


@pytest.mark.parametrize(
    ("text", "stop_before_s", "message"),
    [
        (
            "1-0",
            900,
            r"--stop-before-s 900 is shorter than one held-out set .* math500 1900 s \(estimate\).*least 2280",
        ),
        ("01:15:00", 2400, r"--time 01:15:00 is 4500 s: a measurement on all .* takes 3000 s .* give at least 5460 s"),
    ],
)
def test_a_limit_without_room_for_a_measurement_is_refused(text, stop_before_s, message):
    with pytest.raises(ConfigError, match=message):
        check_room(text, stop_before_s=stop_before_s, step_s=86, source="estimate", evaluation=SETS)


def test_a_limit_with_room_for_a_measurement_is_fine():
    check_room("01:31:00", stop_before_s=2400, step_s=86, source="estimate", evaluation=SETS)
    nothing = EvaluationTime(by_set={}, source="")
    check_room("5", stop_before_s=60, step_s=0, source="", evaluation=nothing)
