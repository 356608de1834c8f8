import pytest

from gtpo_megatron.config.problems import (
    BOXED_TEMPLATE,
    DatasetRef,
    EvaluationConfig,
    check_template,
    fill_template,
    parse_dataset,
    parse_datasets,
)
from gtpo_megatron.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("aime24", DatasetRef(name="aime24")),
        (" AIME24 ", DatasetRef(name="aime24")),
        ("DAPO-Math-17k@65877096c24f", DatasetRef(name="dapo-math-17k", revision="65877096c24f")),
        ("math500=/data/m.jsonl", DatasetRef(name="math500", path="/data/m.jsonl")),
        ("mine = data/x=y.parquet", DatasetRef(name="mine", path="data/x=y.parquet")),
        ("/data/a=b/Train.v2.jsonl", DatasetRef(name="train_v2", path="/data/a=b/Train.v2.jsonl", is_named=False)),
        ("rows.jsonl", DatasetRef(name="rows", path="rows.jsonl", is_named=False)),
        ("./2024.parquet", DatasetRef(name="set_2024", path="./2024.parquet", is_named=False)),
        ("/data/me@home/rows.jsonl", DatasetRef(name="rows", path="/data/me@home/rows.jsonl", is_named=False)),
    ],
)
def test_the_forms_of_a_name(text, expected):
    found = parse_dataset(text, "data")
    assert found == expected
    assert parse_dataset(str(found), "data") == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "data is empty"),
        ("  ", "data is empty"),
        ("aime24=", "nothing after the equals sign"),
        ("aime24@main", "the revision must be a commit"),
        ("aime24@", "the revision must be a commit"),
        ("aime24@65877G", "the revision must be a commit"),
    ],
)
def test_what_is_no_name(text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse_dataset(text, "data")


def test_labels_are_fit_for_metric_names_and_differ():
    refs = parse_datasets(("dapo-math-17k", "a/b.c-d.jsonl"), "sets")
    assert [ref.label for ref in refs] == ["dapo_math_17k", "b_c_d"]
    with pytest.raises(ConfigError, match=r"sets: a_b=1\.jsonl and a-b=2\.jsonl share the name 'a_b'"):
        parse_datasets(("a_b=1.jsonl", "a-b=2.jsonl"), "sets")


def test_the_sets_of_an_evaluation():
    config = EvaluationConfig(path="x.jsonl", benchmarks=("aime24", "math500=m.jsonl"))
    assert list(config.sets) == ["heldout", "aime24", "math500"]
    assert list(EvaluationConfig(benchmarks=("aime24",)).sets) == ["aime24"]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({}, "both empty"),
        ({"path": "x.jsonl", "benchmarks": ("heldout=y.jsonl",)}, "the name 'heldout' is that of path"),
        ({"benchmarks": ("aime24", "aime24=x.jsonl")}, "share the name 'aime24'"),
        ({"path": "x.jsonl", "prompt_template": "Solve."}, r"must hold \{problem\} once"),
        ({"path": "x.jsonl", "samples": 0}, "samples=0"),
    ],
)
def test_evaluations_that_no_run_can_have(fields, complaint):
    with pytest.raises(ConfigError, match=complaint):
        EvaluationConfig(**fields)


def test_a_template_keeps_its_other_braces():
    check_template("t", BOXED_TEMPLATE)
    assert fill_template(BOXED_TEMPLATE, "1+1? {problem}").startswith("1+1? {problem}\n")
    assert fill_template(BOXED_TEMPLATE, "1+1?").endswith("within \\boxed{}.")
