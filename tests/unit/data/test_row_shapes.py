"""Shapes that published rows have: parts of messages, lists and texts in texts, pictures, no answers."""

import csv
import dataclasses
import json

import pytest

from gtpo_megatron import train
from gtpo_megatron.cli import dispatch
from gtpo_megatron.config.problems import parse_dataset
from gtpo_megatron.conversations.environment import row_check
from gtpo_megatron.data.chat_template import load_tokenizer
from gtpo_megatron.data.prompts import RowsNeeded, load_problems
from gtpo_megatron.data.source import read_rows
from gtpo_megatron.errors import ConfigError, DataError
from recipes import tiny_cpu

CHAT = [{"role": "user", "content": "1+1"}]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(tiny_cpu.ASSETS / "tiny_qwen2"))


def written(tmp_path, *rows):
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read(tmp_path, *rows):
    return list(read_rows(parse_dataset(written(tmp_path, *rows), "data")))


def message(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}], "answer": "2"}


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (message({"type": "text", "text": "1+1"}), "1+1"),
        (message({"type": "input_text", "text": "1+1"}), "1+1"),
        (message({"text": "1+1", "type": "text", "image": None}), "1+1"),
        (message("1+1"), "1+1"),
        (message({"type": "text", "text": "What is"}, {"type": "text", "text": "1+1?"}), "What is\n1+1?"),
        ({"prompt": json.dumps(CHAT), "answer": "2"}, "1+1"),
        ({"prompt": str(CHAT), "answer": "2"}, "1+1"),
    ],
)
def test_messages_in_parts_and_in_texts(tmp_path, row, text):
    [found] = read(tmp_path, row)
    assert found.prompt == ({"role": "user", "content": text},)
    assert not found.no_text


@pytest.mark.parametrize("prompt", ["[1, 2] has which sum?", "[1, 2]", '{"a": 1}', '[{"a": 1}]', "[x]"])
def test_a_question_with_brackets_is_a_question(tmp_path, prompt):
    assert read(tmp_path, {"problem": prompt, "answer": "2"})[0].prompt == prompt


@pytest.mark.parametrize(
    ("columns", "answer"),
    [
        ({"answer": ["2"]}, "2"),
        ({"answer": [2]}, "2"),
        ({"answer": '["2"]'}, "2"),
        ({"answer": "['2']"}, "2"),
        ({"reward_model": {"ground_truth": '["\\\\frac{3}{4}"]'}}, "\\frac{3}{4}"),
        ({"reward_model": '{"ground_truth": "2"}'}, "2"),
        ({"reward_model": "{'ground_truth': ['2']}"}, "2"),
        ({"verification_info": '{"ground_truth": "2"}'}, "2"),
        ({"verification_info": {"ground_truth": 2.5}}, "2.5"),
        ({"answer": '{"ground_truth": "2"}'}, "2"),
        ({"answer": "{'answer': ['2']}"}, "2"),
        ({"answer": {"ground_truth": 2}}, "2"),
        ({"reward_model": {"ground_truth": '{"answer": "2"}'}}, "2"),
        ({"answer": '{"name": "f", "arguments": {}}'}, '{"name": "f", "arguments": {}}'),
        ({"answer": "[2]"}, "[2]"),
        ({"answer": "[2, 3]"}, "[2, 3]"),
        ({"answer": "(2, 3)"}, "(2, 3)"),
        ({"answer": "{1, 2}"}, "{1, 2}"),
        ({"answer": "[0, 1)"}, "[0, 1)"),
    ],
)
def test_answers_in_lists_and_in_texts(tmp_path, columns, answer):
    [found] = read(tmp_path, {"prompt": "1+1", **columns})
    assert found.answer == answer


def test_a_named_column_is_found_in_a_text(tmp_path):
    path = written(tmp_path, {"q": "1+1", "info": '{"gold": {"value": "2"}}'})
    ref = dataclasses.replace(parse_dataset(path, "x"), prompt_column="q", answer_column="info.gold.value")
    assert [row.answer for row in read_rows(ref)] == ["2"]


def test_a_table_of_text_has_messages_and_answers(tmp_path):
    with (tmp_path / "set.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["messages", "reward_model"])
        writer.writeheader()
        writer.writerow({"messages": CHAT, "reward_model": {"ground_truth": "2"}})
    [found] = read_rows(parse_dataset(str(tmp_path / "set.csv"), "x"))
    assert (found.prompt, found.answer) == (tuple(CHAT), "2")


PICTURES = [
    ({"prompt": [{"role": "user", "content": "<image>Area?"}], "images": [{"bytes": "", "path": None}]}, "images"),
    ({"problem": "Area?", "image": {"bytes": "x", "path": "a.png"}}, "image"),
    ({"problem": "<image> Area?", "image": "a.png"}, "image"),
    ({"problem": "Area?", "images": ["https://h/a.png"]}, "images"),
    ({"problem": "Area?", "image": "figures/a.PNG"}, "image"),
    ({"problem": "Area?", "image": "data:image/jpeg;base64,AAAA"}, "image"),
    ({"problem": "Area?", "image_url": "https://h/a.webp?size=2"}, "image_url"),
    ({"problem": "Area of <image 1>?", "image_1": "1"}, "image_1"),
    ({"problem": "Area?", "image_2": {"bytes": "x", "path": None}, "image_1": None}, "image_2"),
    ({"problem": "Area?", "decoded_image": {"bytes": "x"}}, "decoded_image"),
    ({"problem": "Who speaks?", "audio_path": "a.flac"}, "audio_path"),
    ({"problem": "Who?", "videos": [["a.mp4"]]}, "videos"),
    ({"problem": "<audio>What is said?", "audio": {"array": [0.1], "sampling_rate": 1}}, "audio"),
    (message({"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "Area?"}), "'image_url'"),
    (message({"type": "image"}), "'image'"),
    (message({"type": "input_audio", "input_audio": {}}, {"type": "text", "text": "Area?"}), "'input_audio'"),
]


@pytest.mark.parametrize(("row", "named"), PICTURES)
def test_what_is_no_text_is_refused_by_name_or_dropped_and_counted(tmp_path, tokenizer, row, named):
    path = written(tmp_path, {"problem": "1+1", "answer": "2"}, {**row, "answer": "72"})
    with pytest.raises(DataError, match=rf"set\.jsonl:2: .*{named}.*; models are given text alone; mend the row"):
        load_problems(path, tokenizer, max_prompt_tokens=96)
    found = load_problems(path, tokenizer, max_prompt_tokens=96, graded_by=RowsNeeded(drops=True))
    assert (len(found.problems), found.num_ungradable) == (1, 1)


@pytest.mark.parametrize("row", [{"problem": "1+1"}, {"problem": "Area?", "image": "a.png", "answer": "72"}])
def test_an_evaluation_is_not_told_of_an_option_that_it_has_not(tmp_path, capsys, row):
    path = written(tmp_path, row)
    arguments = [
        "evaluate",
        str(tiny_cpu.ASSETS / "tiny_qwen2"),
        "--benchmarks",
        f"mine={path}",
        "--output",
        str(tmp_path / "o"),
    ]
    assert dispatch.run(arguments) == 1
    assert capsys.readouterr().err.endswith("; mend the row\n")


@pytest.mark.parametrize(
    "columns",
    [
        {"images": []},
        {"images": None},
        {"image": "python:3.11"},
        {"image_name": "ghcr.io/a/b:1"},
        {"audio": ""},
        {"video": None},
        {"images": "[]"},
    ],
)
def test_columns_of_pictures_without_any_are_text(tmp_path, columns):
    [found] = read(tmp_path, {"problem": "1+1", "answer": "2", **columns})
    assert not found.no_text


@pytest.mark.parametrize("empty", ["", "  ", None, [], float("nan")])
@pytest.mark.parametrize("name", ["", "math500="])
def test_rows_without_an_answer_are_refused_or_dropped_and_counted(tmp_path, tokenizer, empty, name):
    rows = ({"problem": "1+1", "answer": "2"}, {"problem": "1+2", "answer": empty}, {"problem": "1+3"})
    path = name + written(tmp_path, *rows)
    with pytest.raises(DataError, match=r"set\.jsonl:2: answer is .*data\.ungradable_rows=drop"):
        load_problems(path, tokenizer, max_prompt_tokens=96)
    found = load_problems(path, tokenizer, max_prompt_tokens=96, graded_by=RowsNeeded(drops=True))
    assert (len(found.problems), found.num_ungradable) == (1, 2)
    assert "2 rows cannot be graded and are left out; the first: " in "\n".join(found.notes)
    assert len(load_problems(path, tokenizer, max_prompt_tokens=96, graded_by=RowsNeeded(answer=False)).problems) == 3


def test_a_dropped_row_does_not_stand_for_a_later_one_with_its_prompt(tmp_path, tokenizer):
    rows = ({"problem": "1+1", "answer": ""}, {"problem": "1+1", "answer": "2"}, {"problem": "1+1", "answer": "3"})
    path = written(tmp_path, *rows)
    found = load_problems(path, tokenizer, max_prompt_tokens=96, graded_by=RowsNeeded(drops=True))
    assert [one.answer for one in found.problems] == ["2"]
    assert (found.num_ungradable, found.num_repeated, found.num_conflicting) == (1, 1, 1)


def test_too_few_problems_says_why(tmp_path):
    question = " + ".join(["1"] * 60)
    rows = [{"problem": "1+1", "answer": "2"}, {"problem": "1+1", "answer": "2"}, {"problem": "2+2", "answer": ""}]
    config = tiny_cpu.gtpo()
    data = dataclasses.replace(
        config.data,
        train_path=written(tmp_path, *rows, {"problem": question, "answer": "60"}),
        ungradable_rows="drop",
        max_prompt_tokens=96,
        prompts_per_step=2,
    )
    config = dataclasses.replace(config, data=data)
    with pytest.raises(ConfigError, match="exceeds the 1 usable problems") as refused:
        train.check_inputs(config)
    said = str(refused.value)
    assert "of 4 rows 1 have longer prompts than data.max_prompt_tokens" in said
    assert "raise --data.max-prompt-tokens" in said
    assert "1 cannot be graded" in said
    assert "1 repeat an earlier prompt" in said


PAGE = """
class Columns:
    def reset(self, answer, operands, limit=3):
        pass


class Row:
    def reset(self, row):
        return "x"

    def step(self, message):
        pass


class Static:
    @staticmethod
    def reset(*, operands):
        pass


class OfClass:
    @classmethod
    def reset(cls, operands):
        pass


class InC:
    reset = dict.update


def agent(row, *, base_url, api_key):
    return 0.0
"""


def test_a_row_that_an_environment_cannot_take_is_refused_before_a_run(tmp_path):
    """Else each of its episodes would fail, one by one; with ``drop`` it is left out."""
    page = tmp_path / "page.py"
    page.write_text(PAGE)
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text(json.dumps({"problem": "2+2", "operands": 2}))
    rows = [{"problem": "1+1", "operands": 2}, {"problem": "1+2"}, {"problem": "1+3", "operands": None}]

    def problems(name, *rows, **options):
        config = tiny_cpu.tool_gtpo()
        options = {"prompts_per_step": 1, **options}
        data = dataclasses.replace(config.data, train_path=written(tmp_path, *rows), **options)
        environment = dataclasses.replace(config.environment, name=name)
        evaluation = dataclasses.replace(config.evaluation, path=str(heldout))
        found = dataclasses.replace(config, data=data, environment=environment, evaluation=evaluation)
        return train.check_inputs(found).train

    with pytest.raises(DataError, match=r"set\.jsonl:2: reset needs the column 'operands'; the row has prompt, answer"):
        problems(f"{page}:Columns", *rows)
    assert len(problems(f"{page}:Columns", *rows, ungradable_rows="drop")) == 2
    for name in ("Static", "OfClass"):
        with pytest.raises(DataError, match="reset needs the column 'operands'"):
            problems(f"{page}:{name}", *rows)
        assert len(problems(f"{page}:{name}", *rows, ungradable_rows="drop")) == 2
    for name in ("Row", "agent", "InC"):
        assert len(problems(f"{page}:{name}", *rows)) == 3


def test_a_row_of_another_taskset_is_none_of_this_one():
    check = row_check("verifiers:adder?python=/usr/bin/python3")
    assert check('{"task": {}, "taskset": "adder"}') == ""
    assert check('{"task": {}, "taskset": "other"}') == "the row is of the taskset 'other', expected 'adder'"
    assert check("{}").startswith("the row has no task of verifiers; rows are written by: python -m gtpo_megatron.")
