import io

from rich.console import Console

from gtpo_megatron.companions.evaluate import display
from gtpo_megatron.companions.evaluate.benchmark_run import wanted_responses
from gtpo_megatron.companions.evaluate.display import EvaluationDisplay
from tests.unit.companions.evaluate.makers import graded, open_file, problem_set


def test_after_a_resume_the_share_of_correct_responses_is_of_all_that_are_there(tmp_path, monkeypatch):
    """Half of every problem's responses are there, all right; so no problem is complete."""
    monkeypatch.setattr(display, "LINE_EVERY_S", 0.0)
    file = open_file(tmp_path)
    for problem in range(4):
        file.append(graded(f"x-{problem}", 0, reward=1.0))
    file.append(graded("x-0", 7, reward=1.0))  # of a run with more samples; not wanted now
    file.append(graded("x-3", 1, failure="took longer than 1 s"))  # graded again, so not done
    console, wanted = Console(file=io.StringIO()), wanted_responses({"x": problem_set("x", 4)}, 2)
    with EvaluationDisplay(wanted, file, threshold=0.5, console=console) as shown:
        shown.verdict_given(graded("x-0", 1, reward=0.0))
        assert console.file.getvalue().strip() == "x 5/8, 80.0% correct"
        shown.verdict_given(graded("x-1", 1, reward=1.0, failure="took longer than 1 s"))
    assert "x 6/8, 66.7% correct" in console.file.getvalue()


def test_a_share_compares_with_the_threshold_as_training_does(tmp_path, monkeypatch):
    monkeypatch.setattr(display, "LINE_EVERY_S", 0.0)
    console, wanted = Console(file=io.StringIO()), wanted_responses({"x": problem_set("x", 1)}, 1)
    with EvaluationDisplay(wanted, open_file(tmp_path), threshold=0.8, console=console) as shown:
        shown.verdict_given(graded("x-0", 0, reward=sum([0.1] * 8)))
    assert "x 1/1, 100.0% correct" in console.file.getvalue()
