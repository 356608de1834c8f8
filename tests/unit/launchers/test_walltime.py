"""Slurm's notations of time, and limits that leave no room."""

import pytest

from gtpo_megatron.errors import ConfigError
from launchers.walltime import EvaluationTime, check_room, evaluation_time, num_responses, to_seconds
from tests.unit.launchers.jobs import with_evaluation


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


@pytest.mark.parametrize(
    ("dataset", "problems"),
    [
        ("instructions?size=30", 30),
        ("reasoning-gym:chain_sum?size=200&seed=1", 200),
        ("reasoning-gym:chain_sum?size=200&weight=3 + reasoning-gym:countdown?size=100", 300),
        ("aime24", 30),
        ("hub:openai/gsm8k", 7473),
        ("hub:openai/gsm8k:train", 7473),
        ("hub:openai/gsm8k:test", 1319),
        ("hub:openai/gsm8k/main:test", 1319),
        ("hub:openai/gsm8k/socratic:test", 0),
        ("hub:livecodebench/code_generation_lite", 1055),
        ("hub:somebody/problems", 0),
        ("svamp", 0),
        ("nowhere.jsonl", 0),
    ],
)
def test_the_size_of_a_held_out_set_is_what_would_be_read_or_unknown(dataset, problems):
    """Nothing is read from a network, and nothing raises: it is an estimate."""
    config = with_evaluation(path=dataset, benchmarks=(), num_problems=0, samples=2)
    assert num_responses(config) == {"heldout": 2 * problems}


def test_an_unknown_set_has_at_most_the_problems_that_are_asked_for():
    config = with_evaluation(path="hub:somebody/problems", benchmarks=("aime24",), num_problems=40, samples=1)
    assert num_responses(config) == {"heldout": 40, "aime24": 30}


def test_a_file_that_cannot_be_read_has_an_unknown_size(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{\n", encoding="utf-8")
    config = with_evaluation(path=str(tmp_path / "rows.jsonl"), benchmarks=(), num_problems=0)
    assert num_responses(config) == {"heldout": 0}


def test_a_measurement_is_shared_out_only_if_all_sizes_are_known():
    rows = [{"step": 0, "timing/evaluation_s": 90.0}]
    sets = {"path": "hub:somebody/problems", "num_problems": 0}
    alone = evaluation_time(rows, {}, with_evaluation(**sets, benchmarks=()))
    assert alone.by_set == {"heldout": 90.0}
    assert evaluation_time(rows, {}, with_evaluation(**sets, benchmarks=("aime24",))).by_set == {}
    known = evaluation_time(rows, {}, with_evaluation(path="aime25", benchmarks=("aime24",), num_problems=0))
    assert known.by_set == {"heldout": 45.0, "aime24": 45.0}
