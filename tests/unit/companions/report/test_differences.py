import dataclasses
from copy import deepcopy

import pytest

from gtpo_megatron.companions.report.differences import differences
from gtpo_megatron.companions.report.page import content
from gtpo_megatron.companions.report.run_data import read_runs
from gtpo_megatron.run_folder.folder import DataContent
from tests.unit.companions.report.run_folders import CONFIG, make_run

ALL = CONFIG | {
    "data": {"prompts_per_step": 8},
    "rollout": {"group_size": 16},
    "evaluation": {
        "path": "data/heldout.jsonl",
        "benchmarks": ["aime24", "mine=/data/mine.jsonl"],
        "samples": 8,
        "num_problems": 0,
        "prompt_template": "{problem} Think.",
        "sampling": {"kind": "SamplingConfig", "temperature": 1.0, "top_k": 0, "stop_strings": []},
    },
}


def changed(path, value):
    config = deepcopy(ALL)
    *folders, last = path.split(".")
    part = config
    for name in folders:
        part = part[name]
    part[last] = value
    return config


def runs(tmp_path, *configs, labels=("heldout", "aime24", "mine")):
    folders = [
        make_run(tmp_path / f"run{number}", num_steps=1, config=config, responses=False, labels=labels)
        for number, config in enumerate(configs)
    ]
    return read_runs(folders)


@pytest.mark.parametrize(
    ("path", "value", "texts"),
    [
        ("evaluation.samples", 32, ["responses a problem 8 (run0, run2), 32 (run1)."]),
        ("evaluation.num_problems", 100, ["differ: problems all (run0, run2), 100 (run1)."]),
        ("evaluation.sampling.temperature", 0.6, ["temperature 1 (run0, run2), 0.6 (run1)."]),
        ("evaluation.sampling.stop_strings", ["<end>"], ["stop strings none (run0, run2), ['<end>'] (run1)."]),
        ("evaluation.prompt_template", "{problem}", ["differ: prompt templates."]),
        ("data.prompts_per_step", 16, ["128 (run0, run2), 256 (run1)."]),
        ("rollout.group_size", 8, ["128 (run0, run2), 64 (run1)."]),
    ],
)  # fmt: skip
def test_one_difference_is_one_remark_with_the_values_by_run(tmp_path, path, value, texts):
    (remark,) = differences(runs(tmp_path, ALL, changed(path, value), ALL))
    for text in texts:
        assert text in remark


def with_content(run, digit, origin="data/heldout.jsonl"):
    own = DataContent(origin=origin, problems=3, problems_sha256=digit * 64)
    return dataclasses.replace(run, contents={"eval/heldout": own})


def test_problems_are_told_apart_by_their_content_where_it_is_known(tmp_path):
    """One set in two places is the same; one file that was changed between two runs is not."""
    here, there, unknown = runs(
        tmp_path, ALL, changed("evaluation.path", "other/heldout.jsonl"), ALL, labels=("heldout",)
    )
    unknown = dataclasses.replace(unknown, contents={})
    assert differences([with_content(here, "a"), with_content(there, "a", "other/<b>.jsonl"), unknown]) == []
    (remark,) = differences([with_content(here, "a"), with_content(there, "b", "other/<b>.jsonl"), unknown])
    assert remark == (
        "The held-out problems differ, and the accuracies do not compare: data/heldout.jsonl with problems "
        f"{'a' * 16} (run0), other/<b>.jsonl with problems {'b' * 16} (run1)."
    )
    page = content([with_content(here, "a"), with_content(there, "b", "other/<b>.jsonl")]).main
    assert "(run0), other/&lt;b&gt;.jsonl with" in page  # as text


def test_what_is_alike_or_drawn_nowhere_is_no_remark(tmp_path):
    assert differences(runs(tmp_path / "alike", ALL, changed("seed", 7))) == []
    assert differences(runs(tmp_path / "one", ALL)) == []
    heldout = make_run(tmp_path / "heldout", num_steps=1, config=ALL, metrics=lambda _: {})
    other = changed("evaluation.samples", 32) | {"data": {"prompts_per_step": 64}}
    aime24 = make_run(tmp_path / "aime24", num_steps=1, config=other, labels=("aime24",), metrics=lambda _: {})
    assert differences(read_runs([heldout, aime24])) == []  # no figure has both


@pytest.mark.parametrize(
    "evaluation",
    [None, "heldout.jsonl", {"samples": None, "benchmarks": None}, {"benchmarks": [3, "=", None], "sampling": 1.0}],
)
def test_a_run_of_an_older_version_is_left_out_of_what_it_does_not_say(tmp_path, evaluation):
    old = ALL | {"evaluation": evaluation, "data": "train.jsonl"}
    assert differences(runs(tmp_path / "two", ALL, old)) == []
    found = differences(runs(tmp_path / "three", ALL, old, changed("evaluation.samples", 32)))
    assert found == ["Accuracy was not measured alike; these differ: responses a problem 8 (run0), 32 (run2)."]
    assert (
        differences(read_runs([make_run(tmp_path / "none", num_steps=1, config=None), tmp_path / "two" / "run0"])) == []
    )
