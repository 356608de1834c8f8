"""The proof on one GPU: its runner, and its parts with sizes cut down on the CPU."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks.gpu_proof import __main__ as runner
from benchmarks.gpu_proof.catalogue import PARTS
from benchmarks.gpu_proof.needs import GROUPS, THERE
from benchmarks.gpu_proof.page import markdown, values_of
from benchmarks.gpu_proof.report import WHOLE, Report

ROOT = Path(__file__).resolve().parents[3]


def small(folder, *parts, limit=None):
    chosen = [option for part in parts for option in ("--part", part)]
    limits = [] if limit is None else ["--limit", str(limit)]
    return runner.main(["--output", str(folder), "--device", "cpu", "--small", *chosen, *limits])


def test_parts_take_at_most_eight_minutes_and_each_has_a_module():
    assert max(part.limit_s for part in PARTS) <= 480
    found = {path.stem for path in (ROOT / "benchmarks" / "gpu_proof" / "parts").glob("[a-z]*.py")}
    assert found == {part.name for part in PARTS}
    assert {group for part in PARTS for group in part.needs} < GROUPS.keys()


STANDARD = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {*sys.stdlib_module_names, "benchmarks", "gtpo_megatron"}:
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Refused())
from benchmarks.gpu_proof.__main__ import main
raise SystemExit(main(["--output", sys.argv[1], "--device", "cpu", "--small", "--part", "machine", "--limit", "0.01"]))
"""


def test_the_runner_needs_the_standard_library_only(tmp_path):
    """On a bare machine what is unpacked is on the module path of the parts, not on its own."""
    command = [sys.executable, "-c", STANDARD, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "machine: cut off" in done.stdout, done.stderr[-2000:]
    assert "<h1>no part has begun" in (tmp_path / "gpu_proof.html").read_text()


BARE = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Refused())
from gtpo_megatron.actor import actor
from benchmarks.gpu_proof.parts import adapters, gradients, kernels, launches, machine, peers, push, sleep, training
"""


@pytest.mark.slow
@pytest.mark.megatron
def test_a_machine_needs_no_more_than_it_has_and_the_archives_bring():
    """Of what an installation depends on; what these need themselves is not looked for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split("[<>=]", one)[0].strip() for one in (*GROUPS["base"], *THERE)}
    brought = {"pyyaml", "sympy"}  # by transformers and torch
    lacking = {re.split("[<>=]", one)[0].strip() for one in project} - names - brought
    refused = ",".join(name.replace("-", "_") for name in [*lacking, "vllm"])
    done = subprocess.run([sys.executable, "-c", BARE, refused], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "sentencepiece" in refused


def test_a_section_that_raises_is_told_and_the_others_are_kept(tmp_path):
    report = Report(tmp_path / "a.json", {})
    with report.section("first") as section:
        section.figure("rate", 3.0, "GB/s")
        at_once = json.loads((tmp_path / "a.json").read_text())
        assert (at_once["under_way"], at_once["lines"][0]["figures"]) == ("first", {"value": 3.0})
        raise ValueError("no such device\nmore")
    with report.section("second") as section:
        section.require("error", 2.0, "nats", at_most=1.0)
        section.require("other", float("nan"), at_most=1.0)
    with report.section("third") as section:
        section.skip("no GPU")
    found = json.loads((tmp_path / "a.json").read_text())
    assert [(one["group"], one["what"], one["status"], one["measured"]) for one in found["lines"]] == [
        ("first", "rate", "noted", "3 GB/s"),
        ("first", WHOLE, "failed", "ValueError: no such device"),
        ("second", "error", "failed", "2 nats"),
        ("second", "other", "failed", "nan"),
        ("third", WHOLE, "not here", "no GPU"),
    ]
    assert found["lines"][2]["expected"] == "at most 1"
    assert "raise ValueError" in found["lines"][1]["detail"]
    assert found["under_way"] == ""
    assert values_of(found, "first")["rate"] == 3.0
    assert report.has_failed


PASSED = {"group": "a", "what": WHOLE, "status": "passed", "measured": "measured"}
FAILED = {"group": "b", "what": "error", "status": "failed", "measured": "2"}
SKIPPED = {"group": "a", "what": WHOLE, "status": "not here", "measured": "no vLLM"}


@pytest.mark.parametrize(
    ("lines", "under_way", "code", "log", "verdict"),
    [
        ([PASSED], "", 0, "", ("passed", "")),
        ([PASSED, FAILED, FAILED], "", 1, "", ("failed", "b")),
        ([], "", 1, "Traceback\nImportError: x\n", ("failed", "ended with 1: ImportError: x")),
        ([PASSED], "b", -9, "", ("failed", "ended with -9: it said nothing")),
        ([FAILED], "c", -9, "", ("failed", "b; c")),
        ([SKIPPED], "", 0, "", ("skipped", "no vLLM")),
        ([PASSED], "b", None, "", ("cut off", "after 7 s, in b; what was measured before is kept")),
        ([], "", None, "", ("cut off", "after 7 s, in its start; what was measured before is kept")),
    ],
)
def test_how_a_part_ended(lines, under_way, code, log, verdict):
    assert runner._verdict({"lines": lines, "under_way": under_way}, code, 7.0, log) == verdict


def test_the_table_has_every_figure_with_what_it_is_compared_with():
    line = {"group": "7B", "what": "rate of a push", "measured": "212.3 GB/s", "status": "noted"}
    failed = {"group": "x", "what": WHOLE, "status": "failed", "measured": "a | b"}
    parts = {
        "push": {
            "facts": {"device": "H100", "versions": {"torch": "2.11.0"}},
            "status": "failed",
            "reason": "x",
            "lines": [line | {"expected": "planned 200", "figures": {"value": 212.3, "planned": 200.0}}, failed],
        }
    }
    text = markdown(parts)
    assert "H100. torch 2.11.0." in text
    assert text.count("| push | 7B: rate of a push | 212.3 GB/s | planned 200 |") == 2, "in the short table too"
    assert "| push | the part | failed: x |" in text
    assert f"| push | x: {WHOLE} | failed: a \\| b |" in text


@pytest.mark.slow
def test_one_part_after_another_keeps_what_the_first_found(tmp_path):
    assert small(tmp_path, "machine") == 0
    assert small(tmp_path, "kernels") == 0
    results = json.loads((tmp_path / "gpu_proof.json").read_text())
    assert {name: one["status"] for name, one in results.items()} == {"machine": "passed", "kernels": "passed"}
    text = (tmp_path / "gpu_proof.md").read_text()
    assert "| kernels | output layer of small: rates and memory: fused: share of cuBLAS's rate |" in text


def test_a_part_whose_call_was_interrupted_stops_no_later_call(tmp_path):
    Report(tmp_path / "recipe.json", {})
    assert small(tmp_path, "machine", limit=0.2) == 1
    assert (
        "| recipe | the part | failed: cut off when its call was interrupted |"
        in (tmp_path / "gpu_proof.md").read_text()
    )


def test_a_part_that_takes_too_long_is_ended(tmp_path):
    assert small(tmp_path, "machine", limit=0.2) == 1
    assert json.loads((tmp_path / "machine.json").read_text())["status"] == "cut off"


@pytest.mark.nightly
@pytest.mark.megatron
@pytest.mark.timeout(600)
def test_the_parts_that_import_megatron(tmp_path):
    parts = "gradients", "training", "adapters", "launches", "push", "sleep"
    assert small(tmp_path, *parts) == 0, (tmp_path / "gpu_proof.md").read_text()


@pytest.mark.nightly
@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.megatron
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", ["engine", "run", "recipe", "preflight", "pretrained"])
def test_the_parts_with_an_engine(tmp_path, part):
    assert small(tmp_path, part) == 0, (tmp_path / "gpu_proof.md").read_text()
    lines = json.loads((tmp_path / f"{part}.json").read_text())["lines"]
    assert [one["status"] for one in lines if one["what"] == WHOLE] == ["passed"]


def test_the_command_is_thin():
    text = (ROOT / "tools" / "gpu_proof.sh").read_text()
    assert re.search(r"-m benchmarks\.gpu_proof", text)
    assert len(text.splitlines()) < 10
