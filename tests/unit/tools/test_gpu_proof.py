"""The proof on one GPU: its runner, and its parts with sizes cut down on the CPU."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks.gpu_proof import __main__ as runner
from benchmarks.gpu_proof.needs import GROUPS, THERE
from benchmarks.gpu_proof.page import page
from benchmarks.gpu_proof.report import Report

ROOT = Path(__file__).resolve().parents[3]


def small(folder, *parts, limit=None):
    chosen = [option for part in parts for option in ("--part", part)]
    limits = [] if limit is None else ["--limit", str(limit)]
    return runner.main(["--output", str(folder), "--device", "cpu", "--small", *chosen, *limits])


def test_parts_take_at_most_eight_minutes_and_each_has_a_module():
    assert max(runner.PARTS.values()) <= 480
    found = {path.stem for path in (ROOT / "benchmarks" / "gpu_proof" / "parts").glob("[a-z]*.py")}
    assert found == set(runner.PARTS)


BARE = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Refused())
from gtpo_megatron.actor import actor
from benchmarks.gpu_proof.parts import adapters, gradients, kernels, launches, peers, push, sleep, training
"""


@pytest.mark.megatron
def test_a_machine_needs_no_more_than_it_has_and_the_archives_bring():
    """Of what an installation depends on; what these need themselves is not looked for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split("[<>=]", one)[0].strip() for one in (*GROUPS["base"], *THERE)}
    lacking = {re.split("[<>=]", one)[0].strip() for one in project} - names - {"pyyaml"}  # transformers needs it
    refused = ",".join(name.replace("-", "_") for name in [*lacking, "vllm"])
    done = subprocess.run([sys.executable, "-c", BARE, refused], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "sentencepiece" in refused


def test_a_section_that_raises_is_told_and_the_others_are_kept(tmp_path):
    report = Report(tmp_path / "a.json", {})
    with report.section("first") as section:
        section.figure("rate", 3.0, "GB/s")
        assert json.loads((tmp_path / "a.json").read_text())["sections"][0]["figures"]  # at once
        raise ValueError("no such device\nmore")
    with report.section("second") as section:
        section.require("error", 2.0, "nats", at_most=1.0)
        section.require("other", float("nan"), at_most=1.0)
    with report.section("third") as section:
        section.skip("no GPU")
    found = json.loads((tmp_path / "a.json").read_text())["sections"]
    assert [one["status"] for one in found] == ["failed", "failed", "skipped"]
    assert found[0]["reason"] == "ValueError: no such device"
    assert found[1]["reason"] == "error is 2 nats, at most 1 is right; other is nan, at most 1 is right"
    assert report.has_failed


@pytest.mark.parametrize(
    ("sections", "code", "log", "verdict"),
    [
        ([{"name": "a", "status": "passed"}], 0, "", ("passed", "")),
        ([{"name": "a", "status": "passed"}, {"name": "b", "status": "failed"}], 1, "", ("failed", "b")),
        ([], 1, "Traceback\nImportError: x\n", ("failed", "ended with 1: ImportError: x")),
        ([{"name": "a", "status": "begun"}], -9, "", ("failed", "ended with -9: it said nothing")),
        ([{"name": "a", "status": "skipped", "reason": "no vLLM"}], 0, "", ("skipped", "no vLLM")),
        (
            [{"name": "a", "status": "begun"}],
            None,
            "",
            ("cut off", "after 7 s, in a; what was measured before is kept"),
        ),
    ],
)
def test_how_a_part_ended(sections, code, log, verdict):
    assert runner._verdict({"sections": sections}, code, 7.0, log) == verdict


def test_the_table_has_every_figure_with_what_it_is_compared_with():
    figure = {"name": "rate of a push", "value": 212.345678, "unit": "GB/s", "planned": 200.0}
    section = {"name": "7B", "status": "passed", "reason": "", "figures": [figure]}
    failed = {"name": "x", "status": "failed", "reason": "a | b", "figures": []}
    results = {
        "push": {
            "facts": {"device": "H100", "versions": {"torch": "2.11.0"}},
            "status": "failed",
            "reason": "x",
            "sections": [section, failed],
        }
    }
    text = page(results)
    assert "H100. torch 2.11.0." in text
    assert "| push | 7B: rate of a push | 212.3 GB/s | planned 200 |" in text
    assert "| push | x | failed | a \\| b |" in text


def test_one_part_after_another_keeps_what_the_first_found(tmp_path):
    assert small(tmp_path, "machine") == 0
    assert small(tmp_path, "kernels") == 0
    results = json.loads((tmp_path / "gpu_proof.json").read_text())
    assert {name: one["status"] for name, one in results.items()} == {"machine": "passed", "kernels": "passed"}
    text = (tmp_path / "gpu_proof.md").read_text()
    assert "| kernels | output layer of small: rates and memory: fused: share of cuBLAS's rate |" in text


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
    found = json.loads((tmp_path / f"{part}.json").read_text())
    assert [one["status"] for one in found["sections"]] == ["passed"]


def test_the_command_is_thin():
    text = (ROOT / "tools" / "gpu_proof.sh").read_text()
    assert re.search(r"-m benchmarks\.gpu_proof", text)
    assert len(text.splitlines()) < 10
