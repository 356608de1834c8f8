"""The report in a real browser: every figure drawn, nothing on the console, nothing wider than a phone."""

import re
import shutil
import subprocess

import pytest

from gtpo_megatron.observability.report import write_report
from tests.unit.observability.run_folders import make_run

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PHONE_PX = 390

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium")

FRAME = """<!doctype html><iframe src="report.html" style="width:{width}px;height:9000px;border:0"></iframe><script>
addEventListener("load", () => setTimeout(() => {{
  const page = document.querySelector("iframe").contentDocument;
  const plots = [...page.querySelectorAll(".plot")];
  document.title = [
    "width=" + page.documentElement.scrollWidth,
    "plots=" + plots.length,
    "drawn=" + plots.filter((p) => p.dataset.drawn && p.querySelector(".trace, .point")).length,
    "dark=" + (page.defaultView.getComputedStyle(page.body).backgroundColor === "rgb(20, 23, 27)"),
  ].join(" ");
}}, 4000));</script>"""


def browse(folder, *, width, flags=()):
    """Opens the report in a frame of ``width`` pixels; returns what the frame says of it, and console messages."""
    (folder / "frame.html").write_text(FRAME.format(width=width))
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
        "--enable-logging=stderr", "--virtual-time-budget=12000", f"--user-data-dir={folder / 'profile'}", *flags,
        "--dump-dom", f"file://{folder}/frame.html",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    facts = dict(fact.split("=") for fact in title.group(1).split()) if title else {}
    return facts, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_one_run_on_a_phone(tmp_path):
    write_report([make_run(tmp_path / "run")], tmp_path / "report.html")
    facts, console = browse(tmp_path, width=PHONE_PX)
    assert console == []
    assert facts == {"width": str(PHONE_PX), "plots": "11", "drawn": "11", "dark": "false"}


def test_two_runs_in_the_dark(tmp_path):
    runs = [make_run(tmp_path / "gtpo"), make_run(tmp_path / "grpo_with_a_rather_long_name_of_a_run_folder")]
    write_report(runs, tmp_path / "report.html")
    facts, console = browse(tmp_path, width=1280, flags=["--force-dark-mode"])
    assert console == []
    assert facts == {"width": "1280", "plots": "11", "drawn": "11", "dark": "true"}
