"""The report in a real browser: every figure drawn, nothing on the console, nothing wider than a phone."""

import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from gtpo_megatron.report.page import write_report
from gtpo_megatron.run_folder.rollout_log import RolloutLog
from tests.unit.report.run_folders import make_run, response

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PHONE_PX = 390

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium")

FRAME = """<!doctype html><iframe src="report.html" style="width:{width}px;height:30000px;border:0"></iframe><script>
addEventListener("load", () => setTimeout(async () => {{
  const page = document.querySelector("iframe").contentDocument;
  const style = (node) => page.defaultView.getComputedStyle(node);
  const plots = [...page.querySelectorAll(".plot")];
  const facts = {{
    width: page.documentElement.scrollWidth,
    plots: plots.length,
    drawn: plots.filter((p) => p.dataset.drawn && p.querySelector(".trace, .point, .hm image")).length,
    dark: style(page.body).backgroundColor === "rgb(20, 23, 27)",
  }};
  const token = (index) => page.querySelectorAll(".tokens span")[index];
  if (token(1)) {{
    const group = page.querySelector("#pick-group select");
    facts.group = group.value + "/" + group.options.length;
    const count = (kind) => page.querySelectorAll(`.pair .${{kind}} .response`).length;
    facts.texts = ["correct", "incorrect", "unjudged"].map(count).join("+");
    const heat = page.querySelector("#plot-heatmap").data;
    facts.rows = heat[0].y.join("").replaceAll(" ", "");
    facts.reach = heat[1].y[0] + "+" + heat[2].y[0];
    const text = (selector) => page.querySelector(selector).textContent.replace(/\\s+/g, "_");
    facts.first = text(".response .facts");
    facts.cut = text("#heatmap-cut");
    const seen = [];
    for (const view of ["entropy", "shaped_rewards", "advantages"]) {{
      page.querySelector(`.choices input[value=${{view}}]`).click();
      seen.push(style(token(2)).backgroundImage + style(token(2)).backgroundColor);
    }}
    facts.colourings = new Set(seen).size;
    token(1).click();
    facts.readout = page.querySelector("#readout").textContent.trim().replace(/\\s+/g, "_");
    page.querySelector("#next").click();
    await new Promise((done) => setTimeout(done, 500));
    facts.next = page.querySelector("#pick-group select").value;
    facts.prompt = page.querySelector(".prompt").textContent.match(/Compute (\\d+)/)[1];
  }}
  document.title = Object.entries(facts).map(([key, value]) => key + "=" + value).join(" ");
}}, 4000));</script>"""


def browse(folder, *, width, flags=()):
    """Opens the report in a frame of ``width`` pixels; returns what the frame says of it, and console messages."""
    (folder / "frame.html").write_text(FRAME.format(width=width))
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
        "--enable-logging=stderr", "--virtual-time-budget=12000", f"--user-data-dir={folder / 'profile'}", *flags,
        "--dump-dom", f"file://{folder}/frame.html",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    facts = dict(fact.split("=") for fact in title.group(1).split()) if title else {}
    return facts, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_one_run_on_a_phone(tmp_path):
    write_report([make_run(tmp_path / "run")], tmp_path / "report.html")
    facts, console = browse(tmp_path, width=PHONE_PX)
    assert console == []
    assert facts == {
        "width": str(PHONE_PX),
        "plots": "15",
        "drawn": "15",
        "dark": "false",
        "group": "0/2",  # the one with both outcomes
        "texts": "2+2+0",
        "rows": "✓1✓2✓3✓4✓5✗1✗2✗3✗4✗5",
        "reach": "5+5",
        "first": "✓_correct_3_tokens_·_reward_1_·_mean_entropy_0.500_nats_·_mean_advantage_+0.750",
        "cut": "",
        "colourings": "3",
        "readout": '"answer:\\n"_entropy_1_nats_shaped_reward_1.1_advantage_2',
        "next": "1",
        "prompt": "1",
    }


def test_whole_responses_are_summed_up_and_those_without_a_verdict_stand_apart(tmp_path):
    long = replace(
        response(0, 1.0, tokens=("a ", "b ", "c ") * 500),
        token_entropy=[0.0] * 1024 + [1.0] * 476,
        advantages=[1.0] * 1024 + [-1.0] * 476,
    )
    failed = replace(response(0, 0.0), reward_failed=True)
    run = make_run(tmp_path / "run", num_steps=2, responses=False)
    RolloutLog(run, groups_per_step=1).write(2, [failed, response(0, 0.0), long, failed, failed])
    write_report([run], tmp_path / "report.html")
    facts, console = browse(tmp_path, width=PHONE_PX)
    assert console == []
    assert {name: facts[name] for name in ("width", "texts", "rows", "reach", "first", "cut")} == {
        "width": str(PHONE_PX),
        "texts": "1+1+2",
        "rows": "✓1✗1?1?2?3",
        "reach": "1+1",
        "first": "✓_correct_1,500_tokens_·_reward_1_·_mean_entropy_0.317_nats_·_mean_advantage_+0.365",
        "cut": "The_first_1,024_positions_of_up_to_1,500:_1_of_5_responses_are_longer_than_is_drawn.",
    }


@pytest.mark.parametrize("width", [PHONE_PX, 1280])
def test_two_runs_in_the_dark(tmp_path, width):
    runs = [make_run(tmp_path / "gtpo"), make_run(tmp_path / "grpo_with_a_rather_long_name_of_a_run_folder")]
    write_report(runs, tmp_path / "report.html")
    facts, console = browse(tmp_path, width=width, flags=["--force-dark-mode"])
    assert console == []
    assert {name: facts[name] for name in ("width", "plots", "drawn", "dark")} == {
        "width": str(width), "plots": "15", "drawn": "15", "dark": "true",
    }  # fmt: skip


def test_a_run_that_has_nothing_yet(tmp_path):
    (tmp_path / "run").mkdir()
    write_report([tmp_path / "run"], tmp_path / "report.html")
    facts, console = browse(tmp_path, width=PHONE_PX)
    assert console == []
    assert facts == {"width": str(PHONE_PX), "plots": "0", "drawn": "0", "dark": "false"}


def test_foreign_tokens_are_set_apart(tmp_path):
    mixed = replace(
        response(0, 1.0, tokens=("call ", "tool says 4\n", "so 4")),
        token_entropy=[1.0, 0.0, 0.5],
        shaped_rewards=[1.1, 0.0, 1.05],
        advantages=[0.5, 0.0, 0.25],
        foreign_spans=[(1, 2)],
    )
    run = make_run(tmp_path / "run", num_steps=2, responses=False)
    RolloutLog(run, groups_per_step=1).write(2, [mixed, response(0, 0.0)])
    write_report([run], tmp_path / "report.html")
    facts, console = browse(tmp_path, width=PHONE_PX)
    assert console == []
    assert facts["first"] == (
        "✓_correct_2_tokens_·_reward_1_·_mean_entropy_0.750_nats_·_mean_advantage_+0.375"
        "_·_1_more_by_others,_in_italics:_read,_not_learned_from"
    )
