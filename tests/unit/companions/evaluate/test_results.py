import io
import json

import pytest
from rich.console import Console

from gtpo_megatron.companions.evaluate.benchmark_run import Timing
from gtpo_megatron.companions.evaluate.display import results_table
from gtpo_megatron.companions.evaluate.results import RESULTS_FILE, evaluation_result, write_results
from gtpo_megatron.config.evaluate import EvaluateConfig
from gtpo_megatron.config.serialize import to_plain
from gtpo_megatron.errors import ConfigError
from tests.unit.companions.evaluate.makers import fill, graded, measured_set, open_file

FACTS = {"model": {"path": "m", "fingerprint": "f"}, "versions": {"vllm": "1"}, "commit": "c"}


class Folder:
    """The folder of an evaluation, and the commands that work in it."""

    def __init__(self, path):
        self.path, self.file = path, open_file(path)

    def command(self, *, samples=2, has_answers=True, contamination=None, **benchmarks):
        """Asks for benchmarks of so many problems, as often as the verdicts in the file allow."""
        settings = {
            name: benchmarks.pop(name) for name in ("ks", "num_problems", "success_threshold") if name in benchmarks
        }
        self.config = EvaluateConfig(benchmarks=("x=x.jsonl",), samples=samples, **settings)
        sets = {name: measured_set(name, num, contamination=contamination) for name, num in benchmarks.items()}
        facts = FACTS | {"config": to_plain(self.config)}
        self.file.begin_session(facts, sets)
        self.result = evaluation_result(self.file, self.config, asked_for=sets, has_answers=has_answers)
        path, timing = self.path / RESULTS_FILE, Timing(generation_s=3.0, scoring_s=1.0)
        write_results(self.result, path, facts=facts, samples=samples, sessions=self.file.sessions, timing=timing)
        return json.loads(path.read_text(encoding="utf-8"))

    @property
    def table(self):
        console = Console(width=100, record=True, file=io.StringIO())
        console.print(results_table(self.result, samples=self.config.samples, ks=self.config.resolved_ks, title="m"))
        return console.export_text()

    @property
    def rows(self):
        """Cells of the table by the benchmark's first word."""
        return {line.split()[0]: line.split()[1:] for line in self.table.splitlines() if line.strip()}


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def averaged(content):
    """Benchmarks that count in the mean."""
    return [label for label, entry in content["benchmarks"].items() if "figures" in entry]


def test_the_file_has_what_is_needed_to_repeat_the_measurement(folder):
    fill(folder.file, "x", 3)
    matches = [{"problem_id": "x-1", "train_id": "t", "share": 1.0, "is_exact": True}]
    content = folder.command(x=3, contamination={"against": "train.jsonl", "matches": matches})
    assert content["complete"] is True
    assert content["config"]["seed"] == 20250804
    assert content["config"]["sampling"]["temperature"] == 1.0
    assert (content["versions"], content["commit"], content["model"]["fingerprint"]) == ({"vllm": "1"}, "c", "f")
    entry = content["benchmarks"]["x"]
    assert (entry["origin"], entry["content_sha256"]) == ("x.jsonl", "c0")
    assert (entry["num_problems"], entry["num_complete"], entry["samples"]) == (3, 3, 2)
    assert set(entry["figures"]) == {
        "mean@2",
        "reward",
        *(f"{name}@{k}" for name in ("pass", "best", "maj") for k in (1, 2)),
    }
    assert entry["figures"]["mean@2"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert [(p["problem_id"], p["num_samples"], p["pass@2"]) for p in entry["problems"]] == [
        (f"x-{i}", 2, 1.0) for i in range(3)
    ]
    assert entry["contamination"]["matches"][0]["train_id"] == "t"
    assert content["timing"]["generation_frac"] == 0.75


def test_benchmarks_count_alike_in_their_mean(folder):
    fill(folder.file, "few", 1, reward=1.0)
    fill(folder.file, "many", 3, reward=0.0)
    content = folder.command(few=1, many=3)
    assert averaged(content) == ["few", "many"]
    mean = content["mean_over_benchmarks"]
    assert mean["num_benchmarks"] == 2
    assert mean["figures"]["mean@2"] == mean["figures"]["pass@2"] == {"mean": 0.5, "low": 0.5, "high": 0.5}


def test_their_mean_has_an_interval_over_the_problems_of_each(folder):
    for index in range(4):
        for sample in range(2):
            folder.file.append(graded(f"one-{index}", sample, reward=float(index < 2), answer="1"))
    fill(folder.file, "other", 4, reward=1.0)
    content = folder.command(one=4, other=4)
    mean = content["mean_over_benchmarks"]["figures"]["mean@2"]
    alone = content["benchmarks"]["one"]["figures"]["mean@2"]
    assert mean["mean"] == 0.75
    # of the other benchmark nothing is uncertain, so the mean is half as uncertain as the one
    assert mean["high"] - mean["low"] == pytest.approx((alone["high"] - alone["low"]) / 2)
    assert mean["low"] < 0.75 < mean["high"]


def test_scores_of_an_unfinished_benchmark_are_of_its_complete_problems(folder):
    fill(folder.file, "x", 2)
    folder.file.append(graded("x-2", 0, reward=0.0))
    content = folder.command(x=3, y=2)
    assert content["complete"] is False
    assert averaged(content) == ["x"]
    assert content["benchmarks"]["x"]["num_complete"] == 2
    assert content["benchmarks"]["x"]["figures"]["mean@2"]["mean"] == 1.0


def test_a_folder_that_cannot_be_written_is_said(folder):
    (folder.path / RESULTS_FILE).mkdir()
    with pytest.raises(ConfigError, match=r"evaluation\.json cannot be written: Is a directory"):
        folder.command(x=1)


def test_what_the_file_of_results_held_before_does_not_matter(folder):
    fill(folder.file, "x", 2)
    before = folder.command(x=2)
    (folder.path / RESULTS_FILE).write_text("{")
    assert folder.command(x=2) | {"sessions": []} == before | {"sessions": []}


def test_a_benchmark_that_is_measured_later_is_added(folder):
    fill(folder.file, "aime24", 2, reward=1.0)
    before = folder.command(aime24=2)["benchmarks"]["aime24"]
    fill(folder.file, "aime25", 2, reward=0.0)
    content = folder.command(aime25=2)
    assert content["benchmarks"]["aime24"] == before | {"is_earlier": True}
    assert averaged(content) == ["aime24", "aime25"]
    assert content["mean_over_benchmarks"]["figures"]["mean@2"]["mean"] == 0.5
    assert [session["benchmarks"] for session in content["sessions"]] == [["aime24"], ["aime25"]]
    assert content["sessions"][0]["config"]["samples"] == 2
    assert content["sessions"][0]["versions"] == {"vllm": "1"}


def test_an_earlier_benchmark_has_the_figures_of_the_settings_of_now(folder):
    """They are computed from its verdicts: nothing that was measured differently is averaged."""
    for sample, reward in enumerate((1.0, 0.4, 0.4, 0.4)):
        folder.file.append(graded("aime24-0", sample, reward=reward, answer="1"))
    whole = folder.command(aime24=1, samples=4)["benchmarks"]["aime24"]
    assert whole["figures"]["mean@4"]["mean"] == 0.25
    fill(folder.file, "aime25", 1, samples=2)
    lower = folder.command(aime25=1, samples=2, ks=(2,), success_threshold=0.3)
    assert averaged(lower) == ["aime24", "aime25"]
    figures = lower["benchmarks"]["aime24"]["figures"]
    assert set(figures) == {"mean@2", "reward", "pass@2", "best@2", "maj@2"}
    assert figures["mean@2"]["mean"] == 1.0
    assert folder.command(aime24=1, samples=4)["benchmarks"]["aime24"] == whole


def test_an_earlier_benchmark_of_fewer_samples_is_left_out_and_comes_back(folder):
    fill(folder.file, "aime24", 2, samples=2)
    whole = folder.command(aime24=2)["benchmarks"]["aime24"]
    fill(folder.file, "aime25", 2, samples=4)
    content = folder.command(aime25=2, samples=4)
    assert averaged(content) == ["aime25"]
    assert folder.rows["aime24"] == ["(earlier)", "0", "of", "2"]
    assert folder.command(aime24=2)["benchmarks"]["aime24"] == whole


def test_more_samples_that_are_broken_off_lose_no_figure(folder):
    fill(folder.file, "x", 2)
    whole = folder.command(x=2)["benchmarks"]["x"]
    folder.file.append(graded("x-0", 2))
    assert averaged(folder.command(x=2, samples=4)) == []
    assert folder.command(x=2)["benchmarks"]["x"] == whole


def test_what_was_broken_off_earlier_does_not_weigh_as_much_as_a_whole_benchmark(folder):
    fill(folder.file, "aime24", 2, reward=0.0)
    assert averaged(folder.command(aime24=30)) == ["aime24"], "its own mean"
    fill(folder.file, "math500", 3)
    content = folder.command(math500=3)
    assert averaged(content) == ["math500"]
    assert content["complete"] is True, "of what is asked for"
    assert content["mean_over_benchmarks"]["figures"]["mean@2"]["mean"] == 1.0
    assert folder.rows["aime24"] == ["(earlier)", "2", "of", "30"]
    assert "mean of" not in folder.table


@pytest.mark.parametrize(
    ("then", "now", "is_averaged"),
    [(2, 0, False), (2, 3, False), (2, 2, True), (3, 2, True), (0, 2, True), (0, 9, True)],
)
def test_a_trial_of_fewer_problems_is_averaged_with_such_trials_only(folder, then, now, is_averaged):
    fill(folder.file, "aime24", then or 5)
    folder.command(aime24=5, num_problems=then)
    fill(folder.file, "math500", 4)
    content = folder.command(math500=4, num_problems=now)
    assert ("aime24" in averaged(content)) == is_averaged
    assert content["benchmarks"]["aime24"]["num_problems"] == min(now or 5, 5)


def test_a_whole_measurement_counts_though_a_trial_came_after_it(folder):
    fill(folder.file, "aime24", 3, reward=0.0)
    folder.command(aime24=3)
    assert folder.command(aime24=3, num_problems=1)["benchmarks"]["aime24"]["num_problems"] == 1
    fill(folder.file, "math500", 2)
    content = folder.command(math500=2)
    assert averaged(content) == ["aime24", "math500"]
    assert content["benchmarks"]["aime24"]["num_complete"] == 3


def test_half_a_surrogate_pair_in_a_problem_can_be_written(folder):
    for sample in range(2):
        folder.file.append(graded("x-0", sample, reference="\ud83d"))
    assert folder.command(x=1)["benchmarks"]["x"]["problems"][0]["answer"] == "\ud83d"


def test_the_table_fits_a_terminal_and_says_what_is_missing(folder):
    fill(folder.file, "x", 2)
    fill(folder.file, "y", 1, reward=0.0)
    folder.command(x=3, y=1, z=4)
    assert "…" not in folder.table
    rows = folder.rows
    assert rows["x"] == ["2", "of", "3", "100.0", "100.0-100.0", "100.0", "100.0", "100.0", "100.0", "4", "0.0", "0"]
    assert rows["y"][:2] == ["1", "0.0"]
    assert rows["z"] == ["0", "of", "4"]
    assert rows["mean"] == ["of", "2", "50.0", "50.0-50.0", *["50.0"] * 4]


def test_the_table_shows_what_its_mean_counts_though_it_was_measured_earlier(folder):
    fill(folder.file, "aime24", 2, reward=0.0)
    folder.command(aime24=2)
    fill(folder.file, "aime25", 2)
    folder.command(aime25=2)
    assert "mean of 2" in folder.table
    assert folder.rows["aime24"][:3] == ["(earlier)", "2", "0.0"]
    assert folder.rows["aime25"][:2] == ["2", "100.0"]


def test_the_table_has_the_mean_reward_if_it_is_another_figure(folder):
    fill(folder.file, "x", 2, reward=-0.25)
    folder.command(x=2)
    assert "reward" in folder.table
    assert "0.0-0.0 -0.250" in " ".join(folder.table.split())
    fill(folder.file, "x", 2)
    folder.command(x=2)
    assert "reward" not in folder.table


def test_the_table_of_many_ks_shows_two_of_them(folder):
    fill(folder.file, "x", 1, samples=8)
    folder.command(x=1, samples=8)
    (heading,) = (line for line in folder.table.splitlines() if "benchmark" in line)
    assert [name for name in heading.split() if "@" in name] == ["mean@8", "pass@4", "pass@8", "best@8", "maj@8"]


def test_a_table_of_nothing(folder):
    folder.command(x=2)
    assert folder.rows["x"] == ["0", "of", "2"]


def test_answers_that_are_found_later_make_the_majority_that_they_would_have_made_at_once(tmp_path):
    """One correct response among four incorrect ones that agree: without their votes it would win every draw."""

    def filled(folder, answers):
        for sample, answer in enumerate(answers):
            folder.file.append(graded("x-0", sample, reward=float(sample == 0), answer=answer))
        folder.file.close()

    def majority(folder):
        return folder.command(x=1, samples=5)["benchmarks"]["x"]["figures"]["maj@5"]["mean"]

    first, second = Folder(tmp_path / "one"), Folder(tmp_path / "two")
    filled(first, ["0", *["9"] * 4])
    filled(second, [None] * 5)
    first.file = open_file(tmp_path / "one")
    second.file = open_file(tmp_path / "two", lambda text: "0" if text == "text 0" else "9")
    assert majority(second) == majority(first) < 0.2


def test_without_answers_there_is_no_majority(folder):
    fill(folder.file, "x", 1)
    assert "maj@2" not in folder.command(x=1, has_answers=False)["benchmarks"]["x"]["figures"]
    assert " - " in folder.table
