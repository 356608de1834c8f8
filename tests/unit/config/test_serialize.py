"""Configurations survive a file, and a file with a mistake does not become a configuration."""

import dataclasses
import re

import pytest
import yaml

from gtpo_megatron.config.serialize import difference, load_config, to_plain, to_yaml
from gtpo_megatron.errors import ConfigError
from recipes import tiny_cpu
from tests.yaml_text import from_yaml

RECIPES = [tiny_cpu.gtpo, tiny_cpu.grpo_s, tiny_cpu.dapo, tiny_cpu.grpo]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_configuration_survives_a_file(recipe, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(recipe()), encoding="utf-8")
    assert load_config(path) == recipe()


TEXTS = [
    *(
        "null",
        "~",
        "true",
        "no",
        "on",
        "1e5",
        "1E-3",
        "010",
        "0x1F",
        "0o17",
        "1_000",
        "1:30",
        ".inf",
        ".nan",
        "<<",
        "=",
    ),
    *(
        "[a]",
        "{a: 1}",
        "- a",
        "a: b",
        "#a",
        "a #b",
        "*a",
        "&a",
        "!a",
        "|",
        ">",
        "%",
        "@",
        "`",
        "'",
        '"',
        "?",
        "---",
        "...",
    ),
    *(" ", " a ", "a\n", "\n", "\r\n", "\t", "\x07", "\x85", "\u2028", "\ufeff", "ü", "\U0001f600", "2026-01-31"),
    *("2026-01-31 10:00:00", "None", "True", "1.0", "1.", "+1", "-", "\\n", "a\\", "</think>", "x" * 300),
]
"""What YAML takes for something else, or breaks over lines."""


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives_a_file(text, tmp_path):
    """In a list of texts, as a text, and as a name or a value of a mapping."""
    config = tiny_cpu.gtpo()
    sampling = dataclasses.replace(config.rollout.sampling, stop_strings=(text, "b"))
    config = dataclasses.replace(
        config,
        name=text if text.strip() else "a",
        rollout=dataclasses.replace(config.rollout, sampling=sampling),
        data=dataclasses.replace(config.data, template_options={text: text, "a": [text, {"b": text}]}),
    )
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(path) == config
    assert to_yaml(load_config(path)) == to_yaml(config)


@pytest.mark.parametrize("value", [None, True, 0, -1, 1.5, 1e-7, 1e300, [], {}, [1, [2.0, None]], {"a": {"b": [True]}}])
def test_any_value_of_json_survives_in_a_mapping(value, tmp_path):
    config = tiny_cpu.gtpo()
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, template_options={"a": value}))
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    found = load_config(path)
    assert found == config
    assert type(found.data.template_options["a"]) is type(value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["enable_thinking"], r"template_options=.*: got list, expected Mapping\[str, JsonValue\]"),
        ({1: True}, r"expected Mapping\[str, JsonValue\]; at 1\..*: Input should be a valid string"),
        ({"a": {1, 2}}, r"expected Mapping\[str, JsonValue\]; at a: input was not a valid JSON value"),
        ({"a": float("nan")}, "must be a finite number"),
        ({"a": [{"b": 2**70}]}, "must lie between"),
    ],
)
def test_a_mapping_has_names_and_values_of_json(options, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(tiny_cpu.gtpo().data, template_options=options)


def test_a_mapping_is_nobody_else_s():
    given = {"a": [1]}
    data = dataclasses.replace(tiny_cpu.gtpo().data, template_options=given)
    given["a"].append(2)
    assert data.template_options == {"a": [1]}


@pytest.mark.parametrize("day", ["2026-02-30", "20260131", "31.1.2026", "today", "2026-1-31", "2026-01-31T10:00"])
def test_a_date_is_a_day(day):
    with pytest.raises(ConfigError, match="must be a day as in 2026-01-31, or empty"):
        dataclasses.replace(tiny_cpu.gtpo().data, template_date=day)


def edited(*path, **fields):
    """The tiny recipe's YAML with fields set (or, given None as a name's value under ``remove``, left out)."""
    plain = to_plain(tiny_cpu.gtpo())
    node = plain
    for key in path:
        node = node[key]
    node.update(fields)
    return yaml.safe_dump(plain)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (edited(num_stepz=3), "unknown key 'num_stepz' in RunConfig; perhaps you meant 'num_steps'"),
        (edited("optimizer", lr=1.0), "unknown key 'lr' in OptimizerConfig; known: learning_rate"),
        (edited(num_steps="40"), "num_steps='40': got str, expected int"),
        (edited(num_steps=True), "num_steps=True: got bool, expected int"),
        (edited("model", dtype="float16"), "dtype='float16': must be one of 'float32', 'bfloat16'"),
        (
            edited("algorithm", kind="PPOConfig"),
            "algorithm 'PPOConfig': must be module:Class or FILE.py:Class of your own, or one of GTPOConfig",
        ),
        (edited("algorithm", entropy_clip=[1.0]), "entropy_clip"),
        (edited("rollout", group_size=1), "group_size=1"),
        (edited(model=3), "expected the fields of ModelConfig, got 3"),
        ("a: [", "not valid YAML"),
        ("{}", "RunConfig lacks name"),
    ],
)
def test_a_mistake_is_named(text, message):
    with pytest.raises(ConfigError) as error:
        from_yaml(text)
    assert message in str(error.value)


def test_an_integer_stands_for_a_float_but_not_the_other_way():
    assert from_yaml(edited("optimizer", weight_decay=0)).optimizer.weight_decay == 0.0
    with pytest.raises(ConfigError, match=r"seed=1\.0: got float, expected int"):
        from_yaml(edited(seed=1.0))


@pytest.mark.parametrize("written", ["1e-6", "1E-6", "1.e-6", "+1e-06", "1.0e-6"])
def test_a_float_is_written_as_people_write_it(written):
    """YAML 1.1 calls ``1e-6`` a string."""
    text = to_yaml(tiny_cpu.gtpo())
    assert "  learning_rate: " in text
    changed = re.sub(r"^  learning_rate: .*$", f"  learning_rate: {written}", text, count=1, flags=re.MULTILINE)
    assert from_yaml(changed).optimizer.learning_rate == 1e-6


@pytest.mark.parametrize("written", ["'1e-6 '", "e-6", "1e", "1e400", "'1e-6x'", "0x1e-6", "true", "'10'"])
def test_what_is_no_float(written):
    text = re.sub(r"^  learning_rate: .*$", f"  learning_rate: {written}", to_yaml(tiny_cpu.gtpo()), flags=re.MULTILINE)
    with pytest.raises(ConfigError, match="learning_rate="):
        from_yaml(text)


def test_a_pair_is_read_back_as_a_pair():
    config = from_yaml(edited("algorithm", entropy_clip=[0.5, 2]))
    assert config.algorithm.entropy_clip == (0.5, 2.0)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: no such file"):
        load_config(tmp_path / "config.yaml")


def test_differences_name_the_path_and_both_values():
    left = tiny_cpu.gtpo()
    right = dataclasses.replace(left, seed=7, rollout=dataclasses.replace(left.rollout, group_size=4))
    assert difference(left, right) == ["seed: 0 -> 7", "rollout.group_size: 8 -> 4"]
    assert difference(left, left) == []
    assert any(row.startswith("algorithm.kind: 'GTPOConfig'") for row in difference(left, tiny_cpu.grpo()))
