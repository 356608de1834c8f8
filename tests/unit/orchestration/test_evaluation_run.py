import io
from pathlib import Path

import pytest
from rich.console import Console

from gtpo_megatron.config.evaluate import EvaluateConfig
from gtpo_megatron.evaluation.response_file import read_responses
from gtpo_megatron.evaluation.results import ResultFile
from gtpo_megatron.orchestration import evaluation_run
from gtpo_megatron.orchestration.evaluated_model import EvaluatedModel
from tests.unit.evaluation.makers import Grader, Letters, benchmark, graded


@pytest.fixture
def grader(monkeypatch):
    """Grades in this process; the engine must not start."""

    class Scorer(Grader):
        def __init__(self, function, **limits):
            super().__init__()
            opened.append(self)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    def engine(folder, config, stack):
        raise AssertionError("nothing is to be sampled")

    opened = []
    monkeypatch.setattr(evaluation_run, "RewardScorer", Scorer)
    monkeypatch.setattr(evaluation_run, "_engine", engine)
    return opened


def measured(folder, one):
    console = Console(file=io.StringIO(), width=200)
    config = EvaluateConfig(benchmarks=("x=x.jsonl",), samples=2)
    result = ResultFile(folder=folder, config=config, facts={}, benchmarks=[one], has_answers=False)
    evaluation_run._measure(EvaluatedModel(folder=Path("m"), named="m"), result, Letters(), None, console)
    one.file.close()
    return console.file.getvalue()


def test_responses_without_a_verdict_are_graded_again_and_no_engine_is_loaded(tmp_path, grader):
    one = benchmark(tmp_path, "x", 1)
    one.file.append(graded("x-0", 0, reward=1.0))
    one.file.append(graded("x-0", 1, failure="took longer than 1 s"))
    said = measured(tmp_path, one)
    assert f"2 of 2 responses are in {tmp_path} already\nof these, without a verdict and graded again: 1" in said
    assert "loading" not in said
    assert grader[0].graded == [("text 1", "0")]
    assert [(r.sample, r.failure) for r in read_responses(one.file.path)] == [(0, None), (1, None)]


def test_where_nothing_is_missing_nothing_starts(tmp_path, grader):
    one = benchmark(tmp_path, "x", 1)
    for sample in range(2):
        one.file.append(graded("x-0", sample))
    measured(tmp_path, one)
    assert grader == []
