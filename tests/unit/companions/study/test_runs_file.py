"""The file of a study's finished runs: what goes in comes out, whatever was cut or damaged."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from gtpo_megatron.companions.study import runs_file
from gtpo_megatron.companions.study.plan import digest, planned_runs
from gtpo_megatron.companions.study.run_summary import MAX_VALUE
from gtpo_megatron.companions.study.runs_file import RUNS_FILE, append_run, read_runs
from gtpo_megatron.errors import DataError
from tests.unit.companions.study.makers import STUDY, summaries

CURVE = "eval/heldout_mean_at_k"


@pytest.fixture
def runs(tmp_path):
    """Two seeds of two arms, in the order in which a session trains them."""
    return summaries(planned_runs(STUDY, ("gtpo", "grpo"), num_seeds=2, num_steps=4), tmp_path / "made")


@pytest.fixture
def path(tmp_path, runs):
    for run in runs:
        append_run(tmp_path, run)
    return tmp_path / RUNS_FILE


def by_arm(runs):
    return sorted(runs, key=lambda run: (run.arm, run.seed))


def test_what_runs_have_in_common_is_there_once(tmp_path, runs, path):
    assert read_runs(tmp_path) == by_arm(runs)
    first, *lines = map(json.loads, path.read_text().splitlines())
    assert first == {"config": runs[0].config, "provenance": runs[0].provenance}
    assert [(line["arm"], line["seed"]) for line in lines] == [("gtpo", 0), ("grpo", 0), ("gtpo", 1), ("grpo", 1)]
    assert lines[0]["changes"] == {}
    assert lines[2]["changes"] == {"config.seed": 1}
    assert set(lines[1]["changes"]) == {"config.name", "config.algorithm"}  # another kind has other options
    assert lines[0]["curves"][CURVE] == [[0, 0.2], [4, 0.4]]
    assert str(tmp_path) not in path.read_text()


def with_config(run, **changes):
    config = run.config | changes
    return replace(run, config=config, fingerprint=digest(config))


def test_any_difference_comes_back_as_it_was(tmp_path, runs):
    first = with_config(runs[0], extra={"a.b": 1, "c": {"d": 1}, "e": True}, old=1)
    others = [
        with_config(first, extra={"a.b": 2, "c": {"d": 1.0}, "e": 1}),
        with_config(first, extra=None),
        with_config(first, extra={"c": {}}),
        with_config(runs[0], new=[1]),
        replace(first, provenance={"commit": "def"}),
    ]
    for run in (first, *[replace(run, seed=number) for number, run in enumerate(others, start=1)]):
        append_run(tmp_path, run)
    found = read_runs(tmp_path)
    assert [json.dumps([run.config, run.provenance]) for run in found] == [
        json.dumps([run.config, run.provenance]) for run in (first, *others)
    ]  # as text: 1, 1.0 and true are equal


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0.0, 0.01, 0.3, 0.999])
def test_a_cut_end_is_ignored_and_then_removed(tmp_path, runs, path, kept):
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    left = read_runs(tmp_path)
    assert [run.name for run in left] == [run.name for run in by_arm(runs) if run in left]
    assert len(left) < len(runs)
    for run in runs:
        if run not in left:
            append_run(tmp_path, run)
    assert read_runs(tmp_path) == by_arm(runs)


def test_the_last_line_of_a_run_counts(tmp_path, runs, path):
    append_run(tmp_path, replace(runs[0], cost=runs[0].cost | {"training_s": 1.0}))
    assert len(read_runs(tmp_path)) == len(runs)
    assert next(run for run in read_runs(tmp_path) if run.name == runs[0].name).cost["training_s"] == 1.0


ADD = """\
import sys
from dataclasses import replace
from pathlib import Path
from gtpo_megatron.companions.study.runs_file import append_run, read_runs
run = read_runs(Path(sys.argv[1]))[0]
for number in range(40):
    append_run(Path(sys.argv[2]), replace(run, seed=int(sys.argv[3]) + number))
"""


@pytest.mark.slow
def test_two_processes_tear_no_line(tmp_path, path):
    both = [
        subprocess.Popen([sys.executable, "-c", ADD, str(tmp_path), str(tmp_path / "both"), first])
        for first in ("100", "200")
    ]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    assert [run.seed for run in read_runs(tmp_path / "both")] == [*range(100, 140), *range(200, 240)]


def test_a_process_that_keeps_the_file_is_said(tmp_path, runs, path, monkeypatch):
    monkeypatch.setattr(runs_file, "_PATIENCE_S", 0.0)
    descriptor = runs_file.held_locks.acquire(path)
    with pytest.raises(DataError, match=r"runs\.jsonl: another process has held it"):
        append_run(tmp_path, runs[0])
    runs_file.held_locks.let_go(descriptor)
    append_run(tmp_path, runs[0])


def test_a_file_system_without_locks_is_written_too(tmp_path, runs, monkeypatch):
    def has_none(*_, **__):
        raise runs_file.held_locks.NoLockError

    monkeypatch.setattr(runs_file.held_locks, "acquire", has_none)
    append_run(tmp_path, runs[0])
    assert read_runs(tmp_path) == runs[:1]


def change_line(path, number, change):
    lines = path.read_text().splitlines()
    plain = json.loads(lines[number - 1])
    change(plain)
    lines[number - 1] = json.dumps(plain)
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda plain: plain["changes"].update({"config.optimizer.learning_rate": 1.0}),
            "its config was changed: fing",
        ),
        (lambda plain: plain["changes"].update({"config.nothing": 1}), "changes: 'config.nothing' is not in the first"),
        (lambda plain: plain["changes"].update({"config.seed.of": 1}), "changes: 'config.seed.of' is not in the first"),
        (lambda plain: plain["changes"].update({"arm": "other"}), "changes: 'arm' is not in the first line"),
        (lambda plain: plain.pop("changes"), "changes is None, expected"),
        (lambda plain: plain.update(seed=-1), "seed is -1, expected 0 to"),
        (lambda plain: plain.update(num_steps=2), "num_steps is 2, and that of its config is another"),
        (lambda plain: plain["curves"][CURVE].reverse(), "do not ascend from at least 0 to at most 4"),
        (lambda plain: plain["curves"][CURVE].append([4, 0.9]), "do not ascend from at least 0 to at most 4"),
        (lambda plain: plain["curves"][CURVE].append([5, 0.9]), "do not ascend from at least 0 to at most 4"),
        (lambda plain: plain["curves"][CURVE].insert(0, [-1, 0.9]), "do not ascend from at least 0 to at most 4"),
        (lambda plain: plain["curves"][CURVE].clear(), "do not ascend from at least 0 to at most 4"),
        (lambda plain: plain["curves"][CURVE][0].append(-1.5e308), "expected 2 values"),
        (lambda plain: plain["curves"][CURVE][0].__setitem__(1, -1.5e308), "a value is not between -1e"),
        (lambda plain: plain["cost"].update(training_s=2 * MAX_VALUE), "a value is not between -1e"),
        (lambda plain: plain["cost"].clear(), "cost must have training_s, responses, response_tokens, none of them"),
        (lambda plain: plain["cost"].update(training_s=-1.0), "cost must have training_s, responses"),
        (lambda plain: plain.clear(), "changes is None, expected"),
    ],
)
def test_a_run_that_contradicts_itself_is_refused_by_its_line(tmp_path, path, change, said):
    change_line(path, 4, change)
    with pytest.raises(DataError, match=rf"runs\.jsonl:4: not a finished run \(.*{said}.*remove the line"):
        read_runs(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "{} {}"])
def test_a_damaged_line_before_the_last_is_named(tmp_path, runs, path, text):
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], text, *lines[3:]]) + "\n")
    with pytest.raises(DataError, match=r"runs\.jsonl:3: not a finished run"):
        read_runs(tmp_path)
    path.write_text("\n".join([text, *lines[1:]]) + "\n")
    for reads in (lambda: read_runs(tmp_path), lambda: append_run(tmp_path, runs[0])):
        with pytest.raises(DataError, match=r"runs\.jsonl:1: not what the runs below have in common.*move the file"):
            reads()


def test_a_change_of_the_first_line_is_seen(tmp_path, path):
    change_line(path, 1, lambda plain: plain["config"]["optimizer"].update(learning_rate=1.0))
    with pytest.raises(DataError, match=r"runs\.jsonl:2: not a finished run \(its config was changed"):
        read_runs(tmp_path)
