"""The page, its JSON and the lines of a terminal: nothing of a run can become markup, and it fits a phone."""

import dataclasses
import io
import json
import re
import shutil
import subprocess

import pytest
from rich.console import Console

from gtpo_megatron.companions.preflight.page import Report, document, plain, write_page
from gtpo_megatron.companions.preflight.result import CheckResult, assessed, not_here, noted
from gtpo_megatron.companions.preflight.run import JSON_FILE, show, write_report

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FRAME = """<!doctype html><iframe src="preflight.html" style="width:390px;height:4000px;border:0"></iframe><script>
addEventListener("load", () => {
  const page = document.querySelector("iframe").contentDocument;
  document.title = [page.documentElement.scrollWidth, page.querySelectorAll("tbody tr").length,
    page.querySelectorAll(".failures li").length, page.querySelectorAll("b").length].join(" ");
});</script>"""


def line(check, result, group="machines"):
    return dataclasses.replace(result, check=check, group=group, seconds=1.25)


def report(*more):
    lines = (
        line("versions", assessed("versions on 1 node", "torch 2 <b>", is_good=True, expected="the same", remedy="")),
        line("clocks", noted("matrix products", "0.1 TFLOP/s", why="no GPU", figures={"flops": float("inf")})),
        line("clocks", not_here("copies", "no GPU")),
        *more,
    )
    facts = {"layout": "num_ranks=2 <b>", "gpus": []}
    return Report(command="preflight", title="tiny <b>", began="2026-01-01", seconds=61.0, facts=facts, results=lines)


BAD = line(
    "push", assessed("a push", "checksums [red]differ", is_good=False, expected="equal", remedy="mend <b> it"), "step"
)


def test_texts_are_escaped_and_failures_come_first():
    page = document(report(BAD))
    assert "<b>" not in page
    assert page.index("What has not passed") < page.index("<table>")
    assert "mend &lt;b&gt; it" in page
    assert "What has not passed" not in document(report())


def test_a_long_text_is_folded_away_and_in_the_json():
    long = dataclasses.replace(BAD, detail="Traceback <b>")
    assert "<details><summary>more</summary><pre>Traceback &lt;b&gt;</pre></details>" in document(report(long))
    assert (plain(long)["detail"], "detail" in plain(BAD)) == ("Traceback <b>", False)


def test_a_check_has_one_anchor_over_all_groups():
    page = document(report(BAD, line("push", not_here("another", "no GPU"), "other")))
    assert page.count("id='push'") == 1
    assert page.count("<th scope='row'>push</th>") == 1


def test_json_has_every_line(tmp_path):
    write_report(report(BAD), tmp_path)
    found = json.loads((tmp_path / JSON_FILE).read_text())
    assert (found["recipe"], found["layout"], found["gpus"]) == ("tiny <b>", "num_ranks=2 <b>", [])
    assert (found["passed"], found["summary"]) == (False, "1 passed, 1 failed, 1 noted, 1 not here")
    assert found["lines"][3] == {
        "check": "push",
        "group": "step",
        "what": "a push",
        "status": "failed",
        "measured": "checksums [red]differ",
        "expected": "equal",
        "remedy": "mend <b> it",
        "figures": {},
        "seconds": 1.25,
    }
    assert found["lines"][1]["figures"] == {"flops": None}


def test_a_line_of_the_terminal_is_plain_text():
    console = Console(record=True, width=200, file=io.StringIO())
    show(console, BAD)
    shown = console.export_text()
    assert shown.splitlines()[0] == "failed   push         a push: checksums [red]differ (equal)"
    assert "what to do: mend <b> it" in shown


def test_every_status_has_a_mark():
    for status in ("passed", "failed", "noted", "not here", "not run"):
        assert status in document(report(line("x", CheckResult(what="w", measured="m", status=status))))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium")
def test_a_browser_shows_it_on_a_phone(tmp_path):
    write_page(tmp_path / "preflight.html", report(BAD))
    (tmp_path / "frame.html").write_text(FRAME)
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
        "--enable-logging=stderr", "--virtual-time-budget=4000", f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom", f"file://{tmp_path}/frame.html",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    title = re.search(r"<title>(.*?)</title>", done.stdout).group(1)
    assert title == "390 4 1 0"
    assert "CONSOLE" not in done.stderr
