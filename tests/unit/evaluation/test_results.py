import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from gtpo_megatron.batch import Problem
from gtpo_megatron.config.evaluate import EvaluateConfig
from gtpo_megatron.data.contamination import Contamination, Match
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.evaluation.benchmark_run import Benchmark
from gtpo_megatron.evaluation.earlier_results import FILE, read_earlier
from gtpo_megatron.evaluation.response_file import contents_of
from gtpo_megatron.evaluation.results import ResultFile
from gtpo_megatron.evaluation.table import results_table
from tests.unit.evaluation.makers import benchmark, graded

FACTS = {"model": {"path": "m", "fingerprint": "f"}, "versions": {"vllm": "1"}, "commit": "c"}


def result_file(folder, benchmarks, samples=2, has_answers=True, fingerprint="f", **settings):
    """As the command opens it: with what the folder has already."""
    config = EvaluateConfig(benchmarks=("x=x.jsonl",), samples=samples, against="train.jsonl", **settings)
    return ResultFile(
        folder=folder,
        config=config,
        facts=FACTS,
        benchmarks=benchmarks,
        has_answers=has_answers,
        earlier=read_earlier(folder, contents_of(folder, {"seed": 1}), fingerprint),
    )


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
    assert (mean["num_benchmarks"], mean["benchmarks"]) == (2, ["few", "many"])
    assert (mean["num_problems"], mean["left_out"]) == ({"few": 1, "many": 3}, {})
    assert mean["mean_at_k"] == mean["pass_at_k"]["2"] == {"mean": 0.5, "low": 0.5, "high": 0.5}


def test_their_mean_has_an_interval_over_the_problems_of_each(tmp_path):
    one, other = benchmark(tmp_path, "one", 4), benchmark(tmp_path, "other", 4)
    for index, problem in enumerate(one.problems.problems):
        for sample in range(2):
            one.file.append(graded(problem.problem_id, sample, reward=float(index < 2), answer="1"))
    fill(other, num=4, reward=1.0)
    result_file(tmp_path, [one, other]).write_final()
    content = read(tmp_path)
    mean, alone = content["mean_over_benchmarks"]["mean_at_k"], content["benchmarks"]["one"]["mean_at_k"]
    assert mean["mean"] == 0.75
    # of the other benchmark nothing is uncertain, so the mean is half as uncertain as the one
    assert mean["high"] - mean["low"] == pytest.approx((alone["high"] - alone["low"]) / 2)
    assert mean["low"] < 0.75 < mean["high"]


def test_partial_results_are_a_whole_file_and_come_at_most_every_few_seconds(tmp_path):
    one = fill(benchmark(tmp_path, "x", 3), num=1)
    result = result_file(tmp_path, [one])
    result.write_partial()
    content = read(tmp_path)
    assert content["complete"] is False
    assert (content["benchmarks"]["x"]["num_complete"], content["benchmarks"]["x"]["num_problems"]) == (1, 3)
    assert content["benchmarks"]["x"]["mean_at_k"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert "pass_at_k" not in content["benchmarks"]["x"]
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
        result.write_final()


def test_a_benchmark_that_is_measured_later_is_added(tmp_path):
    first = fill(benchmark(tmp_path, "aime24", 2), num=2, reward=1.0)
    result_file(tmp_path, [first]).write_final()
    before = read(tmp_path)["benchmarks"]["aime24"]
    second = fill(benchmark(tmp_path, "aime25", 2), num=2, reward=0.0)
    result = result_file(tmp_path, [second])
    result.write_partial()
    assert read(tmp_path)["benchmarks"]["aime24"]["pass_at_k"] == before["pass_at_k"], "a partial file keeps it too"
    result.write_final()
    content = read(tmp_path)
    kept = content["benchmarks"]["aime24"]
    assert list(content["benchmarks"]) == ["aime24", "aime25"]
    assert {name: kept[name] for name in before} == before
    assert kept["settings"]["config"]["samples"] == 2
    assert kept["settings"]["versions"] == {"vllm": "1"}
    assert content["mean_over_benchmarks"]["benchmarks"] == ["aime24", "aime25"]
    assert content["mean_over_benchmarks"]["mean_at_k"]["mean"] == 0.5
    result_file(tmp_path, [first]).write_final()
    assert "settings" not in read(tmp_path)["benchmarks"]["aime24"], "measured again, by the settings of the file"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"samples": 1}, "other samples or threshold"),
        ({"ks": (2,)}, "other ks"),
        ({"success_threshold": 0.25}, "other samples or threshold"),
    ],
)
def test_only_what_was_measured_alike_is_averaged(tmp_path, settings, reason):
    result_file(tmp_path, [fill(benchmark(tmp_path, "aime24", 2), num=2)], **settings).write_final()
    result_file(tmp_path, [fill(benchmark(tmp_path, "aime25", 2), num=2)]).write_final()
    content = read(tmp_path)
    assert list(content["benchmarks"]) == ["aime24", "aime25"]
    assert content["mean_over_benchmarks"]["benchmarks"] == ["aime25"]
    assert content["mean_over_benchmarks"]["left_out"] == {"aime24": reason}


def head(one, num):
    """As ``--num-problems`` cuts it."""
    return replace(one, problems=one.problems.head(num))


def test_what_was_broken_off_earlier_does_not_weigh_as_much_as_a_whole_benchmark(tmp_path):
    result_file(tmp_path, [fill(benchmark(tmp_path, "aime24", 30), num=2, reward=0.0)]).write_final()
    broken_off = read(tmp_path)["mean_over_benchmarks"]
    assert (broken_off["benchmarks"], broken_off["num_problems"]) == (["aime24"], {"aime24": 2}), "its own mean"
    now = fill(benchmark(tmp_path, "math500", 3), num=3)
    result = result_file(tmp_path, [now])
    text = " ".join(shown([now], result.write_final(), mean=result.mean).split())
    mean = read(tmp_path)["mean_over_benchmarks"]
    assert (mean["benchmarks"], mean["mean_at_k"]["mean"]) == (["math500"], 1.0)
    assert mean["left_out"] == {"aime24": "2 of 30 problems"}
    assert "measured earlier and left out of the mean: aime24 (2 of 30 problems)" in text
    assert "mean of" not in text


@pytest.mark.parametrize(
    ("then", "now", "left_out"),
    [
        (2, 0, {"aime24": "2 of 5 problems"}),
        (2, 3, {"aime24": "2 of 3 problems"}),
        (2, 2, {}),
        (3, 2, {}),
        (0, 2, {}),
        (5, 0, {}),
        (0, 9, {}),
    ],
)
def test_a_trial_of_fewer_problems_is_averaged_with_such_trials_only(tmp_path, then, now, left_out):
    """Either with the number that is measured now or with all that the set has."""
    first = head(benchmark(tmp_path, "aime24", 5), then)
    result_file(tmp_path, [fill(first, num=5)], num_problems=then).write_final()
    second = head(benchmark(tmp_path, "math500", 4), now)
    result_file(tmp_path, [fill(second, num=4)], num_problems=now).write_final()
    assert read(tmp_path)["mean_over_benchmarks"]["left_out"] == left_out


def test_a_whole_measurement_counts_though_a_trial_came_after_it(tmp_path):
    """Its figures are kept beside those of the trial."""
    whole = fill(benchmark(tmp_path, "aime24", 3), num=3, reward=0.0)
    result_file(tmp_path, [whole]).write_final()
    result_file(tmp_path, [head(whole, 1)], num_problems=1).write_final()
    result_file(tmp_path, [fill(benchmark(tmp_path, "math500", 2), num=2)]).write_final()
    mean = read(tmp_path)["mean_over_benchmarks"]
    assert (mean["num_problems"], mean["left_out"]) == ({"aime24": 3, "math500": 2}, {})
    assert mean["mean_at_k"]["mean"] == 0.5


def test_what_has_no_figures_yet_is_left_out_too(tmp_path):
    result_file(tmp_path, [fill(benchmark(tmp_path, "aime24", 2), num=2)]).write_partial()
    result_file(tmp_path, [fill(benchmark(tmp_path, "aime25", 2), num=2)]).write_final()
    assert read(tmp_path)["mean_over_benchmarks"]["left_out"] == {"aime24": "no figures yet"}


def test_more_samples_or_benchmarks_lose_no_figure_on_the_way(tmp_path):
    """However it ends: killed at the first partial file, stopped and written once more, or killed again after that."""
    one, two = fill(benchmark(tmp_path, "x", 2), num=2), benchmark(tmp_path, "y", 2)
    result_file(tmp_path, [one]).write_final()
    whole = read(tmp_path)["benchmarks"]["x"]["pass_at_k"]
    result_file(tmp_path, [one, two]).write_partial()
    assert read(tmp_path)["benchmarks"]["x"]["pass_at_k"] == whole, "nothing about it has changed"
    for write in ("write_partial", "write_final", "write_partial"):
        getattr(result_file(tmp_path, [one, two], samples=4), write)()
        entry = read(tmp_path)["benchmarks"]["x"]
        assert (entry["samples"], entry["num_complete"]) == (4, 0)
        assert entry["earlier"]["pass_at_k"] == whole
        assert entry["earlier"]["settings"]["config"]["samples"] == 2
    for problem in one.problems.problems:
        for sample in (2, 3):
            one.file.append(graded(problem.problem_id, sample, reward=0.0, answer="2"))
    result_file(tmp_path, [one, two], samples=4).write_final()
    entry = read(tmp_path)["benchmarks"]["x"]
    assert set(entry["pass_at_k"]) == {"1", "2", "4"}
    assert "earlier" not in entry


def test_fewer_problems_lose_no_figure_either(tmp_path):
    whole = fill(benchmark(tmp_path, "x", 3), num=3)
    result_file(tmp_path, [whole]).write_final()
    figures = read(tmp_path)["benchmarks"]["x"]["pass_at_k"]
    part = replace(whole, problems=replace(whole.problems, problems=whole.problems.problems[:1]))
    for _ in range(2):
        result_file(tmp_path, [part]).write_final()
        entry = read(tmp_path)["benchmarks"]["x"]
        assert (entry["num_problems"], entry["earlier"]["num_problems"]) == (1, 3)
        assert entry["earlier"]["pass_at_k"] == figures
    result_file(tmp_path, [whole]).write_final()
    assert "earlier" not in read(tmp_path)["benchmarks"]["x"]


def test_figures_without_their_responses_or_of_another_model_are_not_taken_over(tmp_path):
    result_file(tmp_path, [fill(benchmark(tmp_path, "aime24", 2), num=2)]).write_final()
    assert list(result_file(tmp_path, []).earlier) == ["aime24"]
    assert result_file(tmp_path, [], fingerprint="g").earlier == {}
    (tmp_path / "responses" / "aime24.jsonl").unlink()
    assert result_file(tmp_path, []).earlier == {}


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1}'])
def test_a_file_that_says_nothing_we_know_is_written_anew(tmp_path, caplog, text):
    (tmp_path / FILE).write_text(text)
    result_file(tmp_path, [fill(benchmark(tmp_path, "x", 2), num=2)]).write_final()
    assert "is written anew" in caplog.text
    assert list(read(tmp_path)["benchmarks"]) == ["x"]


def test_half_a_surrogate_pair_in_a_problem_can_be_written(tmp_path):
    one = fill(benchmark(tmp_path, "x", 1), num=1)
    problem = Problem(problem_id="x-0", prompt_ids=(1,), answer="\ud83d")
    result_file(tmp_path, [replace(one, problems=replace(one.problems, problems=(problem,)))]).write_final()
    assert read(tmp_path)["benchmarks"]["x"]["problems"][0]["answer"] == "\ud83d"


def shown(benchmarks, scores, samples=2, width=100, mean=None):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(results_table(benchmarks, scores, samples=samples, title="m", mean=mean))
    return console.export_text()


def test_the_table_fits_a_terminal_and_says_what_is_missing(tmp_path):
    x, y = fill(benchmark(tmp_path, "x", 3), num=2), fill(benchmark(tmp_path, "y", 1), num=1, reward=0.0)
    empty = benchmark(tmp_path, "z", 4)
    result = result_file(tmp_path, [x, y, empty])
    scores = result.write_final()
    text = shown([x, y, empty], scores, mean=result.mean)
    assert "…" not in text
    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert lines["x"] == ["2", "of", "3", "100.0", "100.0-100.0", "100.0", "100.0", "100.0", "100.0", "4", "0.0", "0"]
    assert lines["y"][:2] == ["1", "0.0"]
    assert lines["z"] == ["0", "of", "4"]
    assert lines["mean"] == ["of", "2", "50.0", "50.0-50.0", *["50.0"] * 4]


def test_the_table_says_when_its_mean_counts_what_was_measured_earlier(tmp_path):
    result_file(tmp_path, [fill(benchmark(tmp_path, "aime24", 2), num=2, reward=0.0)]).write_final()
    now = fill(benchmark(tmp_path, "aime25", 2), num=2)
    result = result_file(tmp_path, [now])
    text = shown([now], result.write_final(), mean=result.mean)
    assert "mean of 2" in text
    counts = "the mean counts aime24 (2 problems, measured earlier), aime25 (2 problems)"
    assert counts in " ".join(text.split())
    interrupted = result_file(tmp_path, [benchmark(tmp_path, "math500", 2)])
    text = shown(interrupted.benchmarks, interrupted.write_final(), mean=interrupted.mean)
    assert f"{counts[:-1]}, measured earlier)" in " ".join(text.split())


def test_the_table_says_nothing_of_a_mean_that_it_does_not_show(tmp_path):
    result_file(tmp_path, [fill(benchmark(tmp_path, "aime24", 2), num=2)]).write_final()
    interrupted = result_file(tmp_path, [benchmark(tmp_path, "math500", 2)])
    assert "the mean" not in shown(interrupted.benchmarks, interrupted.write_final(), mean=interrupted.mean)


def test_the_table_has_the_mean_reward_where_it_is_another_figure(tmp_path):
    one = fill(benchmark(tmp_path, "x", 2), num=2, reward=-0.25)
    text = shown([one], result_file(tmp_path, [one]).write_final())
    assert "reward" in text
    assert "0.0-0.0 -0.250" in " ".join(text.split())
    assert "reward" not in shown([fill(one, num=2)], result_file(tmp_path, [one]).write_final())


def test_a_table_of_nothing(tmp_path):
    assert "0 of 2" in shown([benchmark(tmp_path, "x", 2)], {})


def test_answers_that_are_found_later_make_the_majority_that_they_would_have_made_at_once(tmp_path):
    """One correct response among four wrong ones that agree: without their votes it would win every draw."""

    def filled(folder, answers):
        one = benchmark(folder, "x", 1)
        for sample, answer in enumerate(answers):
            one.file.append(graded("x-0", sample, reward=float(sample == 0), answer=answer))
        one.file.close()
        return one

    def majority(folder, one):
        return result_file(folder, [one], samples=5).write_final()["x"].maj_at_k[5].mean

    at_once = majority(tmp_path / "one", filled(tmp_path / "one", ["0", *["9"] * 4]))
    filled(tmp_path / "two", [None] * 5)
    later = benchmark(tmp_path / "two", "x", 1, answer_in=lambda text: "0" if text == "text 0" else "9")
    assert majority(tmp_path / "two", later) == at_once < 0.2


def test_without_answers_there_is_no_majority(tmp_path):
    one = fill(benchmark(tmp_path, "x", 1), num=1)
    scores = result_file(tmp_path, [one], has_answers=False).write_final()
    assert read(tmp_path)["benchmarks"]["x"]["maj_at_k"] is None
    assert " - " in shown([one], scores)
