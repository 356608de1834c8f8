import io
import json

import pytest
from rich.console import Console

from gtpo_megatron.config.evaluate import EvaluateConfig
from gtpo_megatron.data.contamination import Contamination, Match
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.evaluation.benchmark_run import Benchmark
from gtpo_megatron.evaluation.results import FILE, ResultFile
from gtpo_megatron.evaluation.table import results_table
from tests.unit.evaluation.makers import benchmark, graded

FACTS = {"model": {"path": "m", "fingerprint": "f"}, "versions": {"vllm": "1"}, "commit": "c"}


def result_file(folder, benchmarks, samples=2, has_answers=True):
    config = EvaluateConfig(benchmarks=("x=x.jsonl",), samples=samples, against="train.jsonl")
    return ResultFile(folder=folder, config=config, facts=FACTS, benchmarks=benchmarks, has_answers=has_answers)


def fill(one, *, num, samples=2, reward=1.0):
    for problem in one.problems.problems[:num]:
        for sample in range(samples):
            one.file.append(graded(problem.problem_id, sample, reward=reward, answer="1", num_tokens=4))
    return one


def read(folder):
    return json.loads((folder / FILE).read_text(encoding="utf-8"))


def test_the_file_has_what_is_needed_to_repeat_the_measurement(tmp_path):
    one = fill(benchmark(tmp_path, "x", 3), num=3)
    found = Contamination(
        num_problems=3, ngram_words=13, matches=(Match(problem_id="x-1", train_id="t", share=1.0, is_exact=True),)
    )
    one = Benchmark(label=one.label, problems=one.problems, file=one.file, contamination=found)
    result = result_file(tmp_path, [one])
    result.write_final()
    content = read(tmp_path)
    assert content["complete"] is True
    assert content["config"]["seed"] == 20250804
    assert content["config"]["sampling"]["temperature"] == 1.0
    assert (content["versions"], content["commit"], content["model"]["fingerprint"]) == ({"vllm": "1"}, "c", "f")
    entry = content["benchmarks"]["x"]
    assert entry["dataset"]["content_sha256"] == "c0"
    assert entry["responses"] == "responses/x.jsonl"
    assert (entry["num_problems"], entry["num_complete"], entry["samples"]) == (3, 3, 2)
    assert entry["mean_at_k"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert set(entry["pass_at_k"]) == {"1", "2"}
    assert [p["num_samples"] for p in entry["problems"]] == [2, 2, 2]
    assert entry["contamination"]["matches"][0]["train_id"] == "t"
    assert content["timing"]["scoring_s"] > 0


def test_benchmarks_count_alike_in_their_mean(tmp_path):
    few = fill(benchmark(tmp_path, "few", 1), num=1, reward=1.0)
    many = fill(benchmark(tmp_path, "many", 3), num=3, reward=0.0)
    result = result_file(tmp_path, [few, many])
    result.write_final()
    mean = read(tmp_path)["mean_over_benchmarks"]
    assert (mean["num_benchmarks"], mean["mean_at_k"], mean["pass_at_k"]["2"]) == (2, 0.5, 0.5)


def test_partial_results_are_a_whole_file_and_come_at_most_every_few_seconds(tmp_path):
    one = fill(benchmark(tmp_path, "x", 3), num=1)
    result = result_file(tmp_path, [one])
    result.write_partial()
    content = read(tmp_path)
    assert content["complete"] is False
    assert (content["benchmarks"]["x"]["num_complete"], content["benchmarks"]["x"]["num_problems"]) == (1, 3)
    fill(one, num=3)
    result.write_partial()
    assert read(tmp_path)["benchmarks"]["x"]["num_complete"] == 1, "too soon"
    assert not list(tmp_path.glob("*.tmp"))


def test_scores_of_an_unfinished_benchmark_are_of_its_complete_problems(tmp_path):
    one = fill(benchmark(tmp_path, "x", 3), num=2)
    one.file.append(graded("x-2", 0, reward=0.0))
    scores = result_file(tmp_path, [one, benchmark(tmp_path, "y", 2)]).write_final()
    assert list(scores) == ["x"]
    content = read(tmp_path)
    assert content["complete"] is False
    assert content["benchmarks"]["x"]["mean_at_k"]["mean"] == 1.0
    assert "mean_at_k" not in content["benchmarks"]["y"]


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    one = benchmark(tmp_path, "x", 1)
    result = result_file(tmp_path, [one])
    (tmp_path / (FILE + ".tmp")).mkdir()
    with pytest.raises(ConfigError, match=r"evaluation\.json cannot be written: Is a directory"):
        result.write({})


def shown(benchmarks, scores, samples=2, width=100):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(results_table(benchmarks, scores, samples=samples, title="m"))
    return console.export_text()


def test_the_table_fits_a_terminal_and_says_what_is_missing(tmp_path):
    x, y = fill(benchmark(tmp_path, "x", 3), num=2), fill(benchmark(tmp_path, "y", 1), num=1, reward=0.0)
    empty = benchmark(tmp_path, "z", 4)
    scores = result_file(tmp_path, [x, y, empty]).write_final()
    text = shown([x, y, empty], scores)
    assert "…" not in text
    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert lines["x"] == ["2", "of", "3", "100.0", "100.0-100.0", "100.0", "100.0", "100.0", "100.0", "4", "0.0", "0"]
    assert lines["y"][:2] == ["1", "0.0"]
    assert lines["z"] == ["0", "of", "4"]
    assert lines["mean"] == ["50.0"] * 5


def test_a_table_of_nothing(tmp_path):
    assert "0 of 2" in shown([benchmark(tmp_path, "x", 2)], {})


def test_without_answers_there_is_no_majority(tmp_path):
    one = fill(benchmark(tmp_path, "x", 1), num=1)
    scores = result_file(tmp_path, [one], has_answers=False).write_final()
    assert read(tmp_path)["benchmarks"]["x"]["maj_at_k"] is None
    assert " - " in shown([one], scores)
