import base64
import json
import random
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from gtpo_megatron.companions.report.page import write_report
from gtpo_megatron.companions.report.traces import ALARM, PALETTE
from gtpo_megatron.errors import DataError
from gtpo_megatron.orchestration.stages.grading import report_failures
from gtpo_megatron.run_folder.rollout_log import RolloutLog
from tests.unit.companions.report.run_folders import ATTACK, CONFIG, make_run, response, step_metrics

MAX_BYTES = 8 << 20
ALL_FIGURES = {
    "reward", "heldout", "best", "entropy", "length", "gap", "groups", "signs", "weights", "clip", "gradient", "memory",
    "throughput", "time", "ratio", "divergence", "rate",
}  # fmt: skip


class Page(HTMLParser):
    """What a browser makes of a report: elements, texts, and the figures' data."""

    VOID = ("meta", "link", "img", "input", "br")

    def __init__(self, path):
        super().__init__()
        self.tags, self.attributes, self.texts, self.scripts, self._open = [], [], [], [], []
        self.html = path.read_text(encoding="utf-8")
        self.feed(self.html)
        self.close()
        assert self._open == []
        data = json.loads(self.scripts[0])
        self.figures, self.runs, self.words, self.axes = (data[name] for name in ("figures", "runs", "words", "axes"))
        self.text = re.sub(r"\s+", " ", "".join(self.texts))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append(dict(attrs))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] == "script":
            self.scripts.append(data)
        elif self._open and self._open[-1] != "style":
            self.texts.append(data)


def tokens_of(page, response):
    """The texts of a response's tokens, as the page's script finds them."""
    return [page.words[index] for index in np.frombuffer(base64.b64decode(response["tokens"]), "<u2")]


def report(tmp_path, *runs):
    out = tmp_path / "out" / "report.html"
    write_report(runs, out)
    return Page(out)


def test_a_whole_run_has_its_settings_headlines_and_every_figure(tmp_path):
    page = report(tmp_path, make_run(tmp_path / "run"))
    assert set(page.figures) == ALL_FIGURES
    for text in (
        "GTPO v6 · 40 of 40 steps · run run",
        "commit4d4b3f773d3d",
        "machines8 x NVIDIA H100, 96 CPUs, 1 host",
        "tiny_model",
        "31.0% → 42.0%",
        "mean@8, +11.0 points; 95% intervals [28.0, 33.0] and [39.0, 44.0]",
        "0.280 → 0.630",  # means of the first and the last five steps
        "7.5e-06",
        "bound 1.0e-04",
        "4:30",  # 40 steps of 6.5 s and two evaluations of 5 s
        "formulation: v6",
    ):
        assert text in page.text
    assert "not measured" not in page.text.lower()
    assert not [attributes for attributes in page.attributes if attributes.get("class") in ("missing", "remark")]


def test_the_file_is_small_and_needs_no_network(tmp_path):
    page = report(tmp_path, make_run(tmp_path / "run"))
    assert len(page.html.encode()) < MAX_BYTES
    ids = {attributes["id"] for attributes in page.attributes if "id" in attributes}
    for attributes in page.attributes:
        assert not attributes.keys() & {"src", "srcset", "action"}
        link = attributes.get("href", "data:,")
        assert link == "data:," or link[1:] in ids
    assert "@import" not in page.html.split("</style>")[0]


def test_the_numbers_drawn_are_those_of_the_run(tmp_path):
    figures = report(tmp_path, make_run(tmp_path / "run")).figures
    faint, strong = figures["reward"]["data"][:2]
    assert faint["y"] == [round(0.25 + step / 100, 6) for step in range(1, 41)]
    assert strong["y"] == pytest.approx(faint["y"])  # a straight line is its own running mean, ends included
    point = figures["heldout"]["data"][0]
    assert (point["x"], point["y"]) == ([0, 40], [0.31, 0.42])
    assert point["error_y"]["array"] == pytest.approx([0.02, 0.02])
    assert point["error_y"]["arrayminus"] == pytest.approx([0.03, 0.03])
    assert figures["gap"]["data"][0]["y"][6] == 8.5e-5  # the largest is never averaged away
    assert figures["gap"]["data"][-1]["y"] == [1e-4, 1e-4]


def test_problems_that_were_trained_on_are_a_remark(tmp_path):
    def leaking(step):
        return step_metrics(step) | ({"eval/heldout_contaminated_count": 6.0} if step == 1 else {})

    page = report(tmp_path, make_run(tmp_path / "run", metrics=leaking))
    assert "6 of the held-out problems are in the training set, too" in page.text
    assert "never trained on" not in page.text


def contrast(one, other):
    """Of two colours as #rrggbb, by WCAG 2."""

    def luminance(color):
        parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_every_colour_can_be_told_from_what_it_lies_on(tmp_path):
    """Text on the hottest token as well, which is the one to read; curves have one colour in light and in dark."""
    style = report(tmp_path, make_run(tmp_path / "run")).html.split("</style>")[0]
    schemes = [dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", part)) for part in style.split("prefers-color-scheme: dark")]
    for colors in schemes:
        assert min(contrast(colors["ink"], colors[name]) for name in ("paper", "heat", "plus", "minus")) >= 4.5
        assert min(contrast(colors["paper"], colors[name]) for name in ("muted", "correct", "incorrect")) >= 4.5
        assert min(contrast(colors["paper"], color) for color in (*PALETTE, ALARM)) >= 3


def test_every_set_that_was_measured_has_its_figure(tmp_path):
    def with_benchmark(step):
        return step_metrics(step) | ({"eval/aime24_mean_at_k": 0.1} if step % 20 == 0 else {})

    figures = report(tmp_path, make_run(tmp_path / "run", metrics=with_benchmark)).figures
    assert set(figures) == ALL_FIGURES | {"accuracy-aime24"}
    assert figures["accuracy-aime24"]["data"][0]["x"] == [20, 40]
    assert "error_y" not in figures["accuracy-aime24"]["data"][0]  # no interval was measured


def with_sets(*benchmarks, path=""):
    return CONFIG | {"evaluation": {"samples": 8, "path": path, "benchmarks": list(benchmarks)}}


def test_a_run_on_benchmarks_alone_has_its_accuracy_by_their_names(tmp_path):
    labels = ("math500", "aime24")  # of the configuration, not of the alphabet
    config = with_sets("math500", "aime24=data/aime.jsonl")
    page = report(tmp_path, make_run(tmp_path / "run", config=config, labels=labels))
    assert set(page.figures) == (ALL_FIGURES - {"heldout"}) | {"accuracy-math500", "accuracy-aime24"}
    assert [key for key in page.figures if key.startswith("accuracy")] == ["accuracy-math500", "accuracy-aime24"]
    assert page.figures["accuracy-aime24"]["data"][0]["y"] == pytest.approx([0.21, 0.32])
    assert "Accuracy on math500 31.0% → 42.0%" in re.sub(r"(math500)(\d)", r"\1 \2", page.text)
    assert "[39.0, 44.0]; mean of 2 sets 26.0% → 37.0%; 95% intervals [23.9, 27.4] and [34.9, 38.4]" in page.text
    for sentence in ("not measured", "Held-out accuracy", "held out"):
        assert sentence not in page.text


def test_the_runs_own_held_out_set_comes_before_its_benchmarks(tmp_path):
    config, labels = with_sets("aime24", path="data/heldout.jsonl"), ("heldout", "aime24")
    page = report(tmp_path, make_run(tmp_path / "run", config=config, labels=labels))
    assert set(page.figures) == ALL_FIGURES | {"accuracy-aime24"}
    assert "Held-out accuracy31.0% → 42.0%" in page.text
    card = page.text.partition("Held-out accuracy31.0%")[2].partition("Reward")[0]
    assert "mean of" not in card  # one benchmark is no mean


def test_a_run_on_nothing_says_so_once(tmp_path):
    page = report(tmp_path, make_run(tmp_path / "run", labels=()))
    assert not {key for key in page.figures if key.startswith(("heldout", "accuracy"))}
    assert page.text.count("Held-out accuracy not measured: no step has eval/heldout_mean_at_k") == 1


@pytest.mark.slow
def test_runs_of_different_sets_are_headed_by_one_they_share_or_each_by_its_own(tmp_path):
    both = make_run(tmp_path / "both", labels=("heldout", "aime24"))
    benchmark = make_run(tmp_path / "benchmark", labels=("aime24",))
    heldout = make_run(tmp_path / "heldout")
    page = report(tmp_path, both, benchmark)
    assert "Accuracy on aime2421.0% → 32.0%mean@8" in page.text
    assert "Accuracy on aime2431.0% → 42.0%mean@8" in page.text
    page = report(tmp_path, heldout, benchmark)
    assert "Held-out accuracy31.0% → 42.0%mean@8" in page.text
    assert "Accuracy on aime2431.0% → 42.0%mean@8" in page.text


def test_a_run_of_an_older_version_is_drawn_as_far_as_it_goes(tmp_path):
    folder = tmp_path / "old"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text("num_steps: 2\nalgo: grpo\nrollout: 8\n")
    (folder / "metrics.jsonl").write_text('{"step": 1, "rollout/reward_mean": 0.5, "loss": 1.0}\n{"step": 2}\n')
    (folder / "rollouts" / "step_000002.jsonl").write_text('{"prompt": "p", "response": "r", "reward": 1.0}\n')
    page = report(tmp_path, folder)
    assert set(page.figures) == {"reward"}
    assert "2 of 2 steps" in page.text
    assert "step_000002.jsonl:1: not a rollout record" in page.text
    assert "No sampled responses were logged." in page.text


def test_what_a_model_wrote_is_text_on_the_page(tmp_path):
    page = report(tmp_path, make_run(tmp_path / "run"))
    assert "img" not in page.tags
    assert page.tags.count("script") == 4
    (group,) = [group for group in page.runs[0]["groups"] if group["group_id"] == 0]
    assert "<b>now</b>" in group["prompt"]
    assert [tokens_of(page, response)[2] for response in group["responses"]] == [ATTACK] * 10


def test_a_name_of_a_run_or_recipe_is_text_on_the_page(tmp_path):
    page = report(tmp_path, make_run(tmp_path / "<img src=x>", config=CONFIG | {"name": "</title><img src=y>"}))
    assert "img" not in page.tags


def test_several_runs_share_the_figures(tmp_path):
    short = make_run(tmp_path / "grpo", num_steps=10, config=CONFIG | {"algorithm": {"kind": "GRPOConfig"}, "seed": 4})
    page = report(tmp_path, make_run(tmp_path / "gtpo"), short)
    assert "2 training runs" in page.text
    assert "GRPO · 10 of 40 steps (not finished)" in page.text
    strong = [trace for trace in page.figures["entropy"]["data"] if trace.get("opacity", 1) == 1]
    assert [(trace["name"], trace["line"]["dash"], trace["line"]["color"]) for trace in strong] == [
        (name, dash, PALETTE[place]) for place, name in enumerate(("gtpo", "grpo")) for dash in ("solid", "dash", "dot")
    ]
    assert [trace["name"] for trace in strong if trace["showlegend"]] == ["gtpo", "grpo"]
    assert "learning rate" in page.text  # equal in both
    assert "Steps differ (gtpo 40, grpo 10)" in page.text
    assert [trace["name"] for trace in page.figures["memory"]["data"]] == ["gtpo", "grpo"]
    assert [run["name"] for run in page.runs] == ["gtpo", "grpo"]
    settings = page.html.split("<dl class='settings shared'>")[1].split("</dl>")[0]
    assert "seed" not in settings  # differs


def test_missing_figures_are_folded_into_a_line_each(tmp_path):
    def sparse(step):
        return {"rollout/reward_mean": 0.5}

    page = report(tmp_path, make_run(tmp_path / "run", metrics=sparse, responses=False))
    assert set(page.figures) == {"reward", "heldout"}
    for line in (
        "Best 32 and best 16 responses not measured: no step has rollout/reward_best_32_mean or rollout/reward_best_16",
        "Learning rate not measured: no step has optimizer/learning_rate",
    ):
        assert line in page.text
    assert "No sampled responses were logged." in page.text


@pytest.mark.parametrize("metrics_text", [None, "", '{"step": 1, "roll'])
def test_a_run_that_died_before_its_first_step_still_has_a_page(tmp_path, metrics_text):
    folder = tmp_path / "run"
    folder.mkdir()
    if metrics_text is not None:
        (folder / "metrics.jsonl").write_text(metrics_text)
    page = report(tmp_path, folder)
    assert page.figures == {}
    assert page.runs == [{"name": "run", "groups": [], "scales": page.runs[0]["scales"]}]
    assert "not measured" in page.text


def test_a_metrics_file_cut_in_mid_line_is_read_up_to_there(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=12)
    text = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(text[:-40])
    page = report(tmp_path, folder)
    assert page.figures["reward"]["data"][0]["x"] == list(range(1, 12))
    assert "metrics.jsonl ends in mid-line 13" in page.text
    assert "11 of 40 steps (not finished)" in page.text


def test_nan_in_the_metrics_leaves_a_gap_and_no_crash(tmp_path):
    def with_nan(step):
        return step_metrics(step) | {"policy/entropy_nats": float("nan"), "optimizer/grad_norm": float("inf")}

    page = report(tmp_path, make_run(tmp_path / "run", metrics=with_nan))
    assert "gradient" not in page.figures
    assert {trace["name"] for trace in page.figures["entropy"]["data"]} == {"correct", "incorrect"}


@pytest.mark.slow
def test_what_is_the_same_at_every_step_is_folded_with_its_value(tmp_path):
    def rising(step):
        return step_metrics(step) | {"policy/clip_frac": step / 1000}

    flat, other = make_run(tmp_path / "flat"), make_run(tmp_path / "other", metrics=rising)
    page = report(tmp_path, flat)
    folded = {each["id"] for each in page.attributes if each.get("class") == "folded"}
    assert folded == {
        f"folded-{key}"
        for key in ("best", "entropy", "groups", "ratio", "clip", "gradient", "signs", "weights", "throughput", "time")
    } | {"folded-memory"}
    assert "Importance ratio the same at every step: current to old 1, trainer to sampler 1" in page.text
    assert "Clipped tokens the same at every step: all 0" in page.text
    both = report(tmp_path, flat, other)
    folded = {each["id"] for each in both.attributes if each.get("class") == "folded"}
    assert "folded-clip" not in folded
    assert "folded-entropy" in folded  # equal in both
    short = report(tmp_path, make_run(tmp_path / "short", num_steps=4))
    assert not [each for each in short.attributes if each.get("class") == "folded"]


def test_runs_that_are_constant_and_differ_are_worth_a_look(tmp_path):
    def other(step):
        return step_metrics(step) | {"policy/clip_frac": 0.01}

    page = report(tmp_path, make_run(tmp_path / "a"), make_run(tmp_path / "b", metrics=other))
    assert "Clipped tokens the same" not in page.text


def test_every_section_has_a_link_at_the_top(tmp_path):
    page = report(tmp_path, make_run(tmp_path / "run"))
    top, _, rest = page.html.partition("</nav>")
    links = re.findall(r'href="#([^"]+)"', top.partition("<nav")[2])
    assert links == ["health", "results", *(f"curves-{name}" for name in ("outcome", "policy", "credit", "machine")),
                     "responses", "configuration"]  # fmt: skip
    assert all(f"id='{link}'" in rest or f'id="{link}"' in rest for link in links)
    assert {f"figure-{key}" for key in ALL_FIGURES} <= {each.get("id") for each in page.attributes}


def test_entropies_by_outcome_are_drawn_where_the_overall_one_is_missing(tmp_path):
    def by_outcome(step):
        return {"credit/entropy_correct_nats": 0.4, "credit/entropy_incorrect_nats": 0.6}

    page = report(tmp_path, make_run(tmp_path / "run", metrics=by_outcome))
    assert {trace["name"]: trace["y"][0] for trace in page.figures["entropy"]["data"]} == {
        "correct": 0.4,
        "incorrect": 0.6,
    }


def test_a_flat_curve_stays_out_of_the_other_runs_legend(tmp_path):
    def rising(step):
        return {"policy/clip_frac": step / 30, "policy/clip_frac_high": step / 60}

    def flat(step):
        return {"policy/clip_frac": 0.0, "policy/clip_frac_high": 0.0}

    runs = [make_run(tmp_path / name, num_steps=30, metrics=of) for name, of in (("ra", rising), ("rb", flat))]
    traces = report(tmp_path, *runs).figures["clip"]["data"]
    assert [(trace["name"], trace["legendgroup"]) for trace in traces] == [("ra", "ra")] * 4 + [("rb", "rb")] * 2


@pytest.mark.slow
def test_long_runs_are_thinned_without_losing_a_peak_and_say_so(tmp_path):
    def spiky(step):
        values = dict.fromkeys(step_metrics(step), step * 7919 % 1000 / 1000)
        return values | {"sync/logprob_gap_max": 0.5 if step == 1234 else 1e-5, "eval/aime24_mean_at_k": step / 3000}

    run = make_run(tmp_path / "run", num_steps=3000, metrics=spiky)
    for runs, most in (([run], 402), ([run] * 10, 202)):
        page = report(tmp_path, *runs)
        for figure in page.figures.values():
            for trace in figure["data"]:
                assert len(trace["x"]) <= most
                assert len(trace["x"]) == len(trace["y"])
        gap = page.figures["gap"]["data"][0]
        assert max(zip(gap["y"], gap["x"], strict=True)) == (0.5, 1234)
        assert (gap["x"][0], gap["x"][-1]) == (1, 3000)
        means = page.figures["entropy"]["data"][1]
        assert (means["x"][0], means["x"][-1]) == (1, 3000)
        assert len(json.dumps(page.figures)) < 2_000_000
        assert "values only the least and the greatest are drawn" in page.text
    assert "Of every 15 values" in report(tmp_path, run).text


@pytest.mark.slow
def test_a_page_of_long_chinese_texts_and_many_digits_stays_within_its_bytes(tmp_path):
    rng = random.Random(1)
    run = make_run(tmp_path / "run", num_steps=40)
    rows = []
    for number in range(32):
        tokens = rng.choices(("因此", "我们可以", "。", "<"), k=190)
        row = response(number % 2, float(number % 3 == 0), tokens=())
        rows.append(
            replace(
                row,
                prompt="求" * 5000,
                answer="解" * 2000,
                tokens=tokens,
                token_entropy=[rng.expovariate(3) * 10 ** -rng.choice((0, 5)) for _ in tokens],
                shaped_rewards=[-rng.random() * 1e-5 for _ in tokens],
                advantages=[-rng.random() * 1e-5 for _ in tokens],
            )
        )
    RolloutLog(run, groups_per_step=2).write(1, rows)
    written = (run / "rollouts" / "step_000001.jsonl").read_bytes()
    for step in range(2, 33):
        (run / "rollouts" / f"step_{step:06d}.jsonl").write_bytes(written)
    page = report(tmp_path, run)
    assert 6 << 20 < len(page.html.encode()) < MAX_BYTES
    assert tokens_of(page, page.runs[0]["groups"][0]["responses"][0])[0] in ("因此", "我们可以", "。", "<")


def test_a_report_is_replaced_only_by_a_whole_one(tmp_path, monkeypatch):
    folder, out = make_run(tmp_path / "run"), tmp_path / "report.html"
    write_report([folder], out)
    before = out.read_bytes()
    monkeypatch.setattr("gtpo_megatron.companions.report.page.document", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report([folder], out)
    assert out.read_bytes() == before


def test_a_page_that_cannot_take_its_place_leaves_no_scratch_file(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=1)
    (tmp_path / "out").mkdir()
    with pytest.raises(OSError, match="out"):
        write_report([folder], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_a_wrong_folder_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no such run folder"):
        write_report([tmp_path / "typo"], tmp_path / "report.html")


def test_plotly_accepts_every_figure(tmp_path):
    import plotly.graph_objects as go

    figures = report(tmp_path, make_run(tmp_path / "run"), make_run(tmp_path / "other")).figures
    for figure in figures.values():
        go.Figure(data=figure["data"], layout=figure["layout"])  # raises at an unknown or malformed property


def test_a_limit_is_named_by_what_it_limits_and_has_its_colour(tmp_path):
    traces = {trace["name"]: trace for trace in report(tmp_path, make_run(tmp_path / "run")).figures["gap"]["data"]}
    assert traces["bound, 0.0001"]["line"]["color"] == traces["99%"]["line"]["color"]
    assert traces["99%"]["line"]["color"] != traces["largest"]["line"]["color"]


def test_a_curve_alone_in_its_figure_is_named(tmp_path):
    figures = report(tmp_path, make_run(tmp_path / "run")).figures
    assert len(figures["gradient"]["data"]) >= 1
    assert figures["gradient"]["layout"]["showlegend"]


def test_health_is_at_the_top_with_its_rules(tmp_path):
    """Marks besides colours; the sampled run has nothing that is not green."""
    sound = make_run(tmp_path / "sound")
    page = report(tmp_path, sound)
    assert page.text.index("signs are green") < page.text.index("Held-out accuracy")
    assert "amber from 70%, red from 90%" in page.text
    rows = [json.loads(line) for line in (sound / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["rollout/groups_mixed_frac"] = 0.05
    (sound / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sick = report(tmp_path, sound).text
    assert sick.index("✕groups without variance 95% of the groups") < sick.index("signs are green")
    both = report(tmp_path, sound, make_run(tmp_path / "other")).text
    assert "sound✕groups without variance" in both.replace("\n", ""), "a sign comes after the name of its run"


def test_missing_verdicts_have_the_reasons_of_the_log(tmp_path, caplog):
    """As the code that grades logs them, twice: the page has the last."""
    missing = {"rollout/reward_failed_count": 2.0, "rollout/responses_count": 8.0}
    run = make_run(tmp_path / "run", metrics=lambda step: step_metrics(step) | missing)
    report_failures(["ValueError: the first step", None])
    report_failures([None, "KeyError: '<b>'", "KeyError: '<b>'", "no answer in 5 s"])
    with (run / "log.txt").open("a") as log:
        for record in caplog.records:
            log.write(f"2026-11-23 03:26:08,000 {record.levelname} {record.name}: {record.getMessage()}\n")
    text = report(tmp_path, run).text
    assert (
        "graders 10 of 40 responses without a verdict; last: 2 x KeyError: '<b>' (row 1 first); 1 x no answer in 5 s"
    ) in text
    assert "the first step" not in text
