"""docs/metrics.md is the list of metrics: its names are well formed, and it has every metric that the report draws."""

import re
from pathlib import Path

from gtpo_megatron.companions.report import figures as report_figures
from gtpo_megatron.companions.report import headline as report_headline
from gtpo_megatron.config.problems import HELDOUT, metric_names
from gtpo_megatron.observability.metrics import check_name

ROOT = Path(__file__).parents[3]
NAME = re.compile(r"\b(?:rollout|policy|credit|optimizer|sft|sync|eval|timing|throughput|memory)/[a-z0-9_]+")


def _documented():
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_documented_names_are_well_formed():
    names = _documented()
    assert len(names) > 40
    for name in names:
        check_name(name.replace("NAME", "name"))  # of a part of the reward
    assert {"credit/effective_frac_incorrect", "credit/entropy_incorrect_nats", "timing/weight_sync_s"} <= names


def test_what_the_report_draws_is_documented():
    drawn = set()
    for module in (report_figures, report_headline):
        drawn |= set(NAME.findall(Path(module.__file__).read_text(encoding="utf-8")))
    drawn |= set(metric_names(HELDOUT))  # composed of the labels of sets
    assert len(drawn) > 20
    assert drawn - _documented() == set()
