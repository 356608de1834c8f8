"""Rows of reasoning-gym by name."""

import importlib.metadata
import json
import subprocess

import pytest

from gtpo_megatron.config.generated import GeneratedSet
from gtpo_megatron.config.problems import parse_dataset
from gtpo_megatron.config.reasoning_task import gym_version
from gtpo_megatron.data import reasoning_tasks
from gtpo_megatron.data.contamination import find_contamination
from gtpo_megatron.data.source import check_source, origin_of, read_rows
from gtpo_megatron.data.unique_rows import load_questions
from gtpo_megatron.errors import ConfigError, DataError

gym = pytest.importorskip("reasoning_gym", reason="needs the extra tasks")


def rows_of(text):
    return list(read_rows(parse_dataset(text, "data")))


def test_a_row_has_the_task_s_question_answer_and_difficulty():
    rows = rows_of("reasoning-gym:chain_sum?size=3&seed=2&max_terms=3&allow_negation=true")
    made = gym.create_dataset("chain_sum", size=3, seed=2_000_000, max_terms=3, allow_negation=True)
    assert [(row.question, row.answer) for row in rows] == [(one["question"], one["answer"]) for one in made]
    assert all(row.is_bare and row.source == "chain_sum" for row in rows)
    columns = json.loads(rows[0].columns_json)
    assert columns["task"] == {"name": "chain_sum", "options": {"allow_negation": "true", "max_terms": "3"}}
    assert columns["difficulty"] == {"num_terms": [2, 3], "num_digits": [1, 4]}
    assert columns["metadata"]["expression"] == made[0]["metadata"]["expression"]


@pytest.mark.slow
def test_the_same_name_is_the_same_rows_in_every_process():
    """``word_ladder`` goes through sets of words, whose order is another one in each process."""
    text = "reasoning-gym:word_ladder?size=4"
    assert [row.columns_json for row in rows_of(text)] == [row.columns_json for row in rows_of(text)]


@pytest.mark.slow
def test_a_mixture_is_evenly_mixed():
    rows = rows_of("reasoning-gym:chain_sum?size=4&weight=3 + reasoning-gym:gcd?size=4")
    assert [row.source for row in rows] == ["chain_sum"] * 2 + ["gcd"] + ["chain_sum"] * 3 + ["gcd", "chain_sum"]
    assert [row.place for row in rows[:3]] == ["chain_sum, row 1", "chain_sum, row 2", "gcd, row 1"]


@pytest.mark.slow
def test_questions_in_two_sets_are_counted():
    sets = [parse_dataset(f"reasoning-gym:gcd?size=60&max_value=4&seed={seed}", "data") for seed in (1, 2)]
    train, heldout = map(load_questions, sets)
    common = {*train.texts} & {*heldout.texts}
    assert find_contamination(train, heldout).num_exact == len(common) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("chain_sums", "no task 'chain_sums'; closest: chain_sum"),
        ("zzzzz", "no task 'zzzzz'; closest: ab, acre, advanced_geometry"),
        ("composite", "no task 'composite'"),
        ("gcd?min_val=3", r"no option 'min_val'; did you mean min_value\?; its options are .*max_value \(int, 1000\)"),
        ("gcd?min_value=low", "gcd: min_value='low': Input should be a valid integer"),
        ("gcd?min_value=9&max_value=4", "gcd with max_value=4, min_value=9 is refused: max_value must be"),
    ],
)
def test_what_a_task_has_not(text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        check_source(parse_dataset(f"reasoning-gym:{text}", "data"))


def test_the_version_is_in_the_origin():
    assert origin_of(parse_dataset("reasoning-gym:gcd", "data")).endswith(f"seed=0 (version {gym_version()})")


def test_a_missing_package_is_one_line(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ConfigError, match=r"pip install 'gtpo-megatron\[tasks\]'"):
        rows_of("reasoning-gym:gcd?size=1")


def generated_by(script, monkeypatch, num=3):
    """The records of a generator that is a shell script."""
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: start(["sh", "-c", script], **options))
    return list(reasoning_tasks.task_records(GeneratedSet(generator="reasoning-gym", task="gcd"), num))


def test_a_generator_that_does_not_end_is_given_up(monkeypatch):
    monkeypatch.setattr(reasoning_tasks, "ROW_LIMIT_S", 0.2)
    with pytest.raises(DataError, match=r"row 2 of 3 was not there after 0\.2 s: its generator may not end"):
        generated_by("""echo '{"record": {}}'; exec sleep 100""", monkeypatch)


def test_a_generator_that_fails_says_where(monkeypatch):
    with pytest.raises(DataError, match=r"ended after 1 of 3 rows \(exit status 7\)"):
        generated_by("""echo '{"record": {}}'; exit 7""", monkeypatch)
    monkeypatch.undo()
    with pytest.raises(DataError, match="row 2: its generator raised KeyError: 'x'"):
        generated_by("""echo '{"record": {}}'; echo '{"raised": "KeyError: '"'x'"'"}'""", monkeypatch)


@pytest.mark.slow
def test_a_generator_ends_with_its_reader():
    records = reasoning_tasks.task_records(GeneratedSet(generator="reasoning-gym", task="gcd"), 10**6)
    next(records)
    process = records.gi_frame.f_locals["made"]
    records.close()
    assert process.poll() is not None
