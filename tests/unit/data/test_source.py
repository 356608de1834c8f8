import decimal
import json
from fractions import Fraction

import pytest

from gtpo_megatron.config.problems import BOXED_TEMPLATE, DAPO_TEMPLATE, fill_template, parse_dataset
from gtpo_megatron.data import source
from gtpo_megatron.data.rows import answer_text
from gtpo_megatron.errors import ConfigError, DataError

CHAT = [{"role": "user", "content": "1+1?"}]


def read_rows(path):
    """Rows as a reward that needs reference answers has them."""
    for row in source.read_rows(parse_dataset(path, "data")):
        row.check_answer()
        yield row


def jsonl(tmp_path, *lines, name="set.jsonl"):
    path = tmp_path / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def parquet(tmp_path, records):
    import pyarrow
    import pyarrow.parquet

    path = str(tmp_path / "set.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


DAPO = {
    "data_source": "math_dapo",
    "prompt": CHAT,
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}


def test_jsonl_rows_of_every_accepted_form(tmp_path):
    path = jsonl(
        tmp_path,
        {"prompt": CHAT, "answer": "2", "id": "a", "source": "mine"},
        "",
        {"prompt": "What is 1+1?", "answer": 2, "id": 7},
        {"prompt": CHAT, "answer": 0},
        {"prompt": CHAT, "answer": " 2.5 "},
        DAPO,
        {"problem": "ignored", "prompt": "x", "answer": "y", "id": None},
    )
    rows = list(read_rows(path))
    assert [row.answer for row in rows] == ["2", "2", "0", "2.5", "34", "y"]
    assert [row.row_id for row in rows] == ["a", "7", None, None, None, None]
    assert [row.source for row in rows] == ["mine", "set", "set", "set", "math_dapo", "set"]
    assert rows[0].prompt == tuple(CHAT)
    assert rows[1].prompt == "What is 1+1?"
    assert [row.place.rsplit(":", 1)[1] for row in rows] == ["1", "3", "4", "5", "6", "7"]


@pytest.mark.parametrize(("number", "said"), [("NaN", "nan"), ("Infinity", "inf"), ("-Infinity", "-inf")])
def test_a_number_that_is_none_is_no_answer(tmp_path, number, said):
    """A data frame writes a missing value as NaN; as the text 'nan' it would make every response wrong."""
    path = jsonl(tmp_path, {"prompt": "a", "answer": 1.5}, f'{{"prompt": "b", "answer": {number}}}')
    with pytest.raises(DataError, match=rf"set\.jsonl:2: answer is missing \({said}\); expected text or a finite"):
        list(read_rows(path))
    table = parquet(tmp_path, [{"prompt": "a", "answer": 1.5}, {"prompt": "b", "answer": float(number)}])
    with pytest.raises(DataError, match=rf"set\.parquet, row 2: answer is missing \({said}\)"):
        list(read_rows(table))


def test_a_decimal_number_is_an_answer(tmp_path):
    """Parquet's kind of numbers that are written out, as money is."""
    numbers = {"2.00": "2.00", "-0.5": "-0.5", "1E+3": "1000"}
    for written, text in numbers.items():
        [row] = read_rows(parquet(tmp_path, [{"prompt": "a", "answer": decimal.Decimal(written)}]))
        assert Fraction(row.answer) == Fraction(text)
        assert "E" not in row.answer
    with pytest.raises(DataError, match=r"p: answer is missing \(nan\); expected text or a finite number"):
        answer_text(decimal.Decimal("sNaN"), "p", "answer")


def test_parquet_rows_equal_jsonl_rows(tmp_path):
    records = [DAPO, {**DAPO, "reward_model": {**DAPO["reward_model"], "ground_truth": "7"}}]
    rows = list(read_rows(parquet(tmp_path, records)))
    assert [(row.prompt, row.answer, row.source) for row in rows] == [
        (row.prompt, row.answer, row.source) for row in read_rows(jsonl(tmp_path, *records))
    ]
    assert rows[1].place.endswith("set.parquet, row 2")


def test_a_malformed_parquet_row_is_named_by_number(tmp_path):
    path = parquet(tmp_path, [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": None}])
    with pytest.raises(DataError, match=r"set\.parquet, row 2: answer is missing"):
        list(read_rows(path))


def test_a_broken_parquet_file_is_a_data_error(tmp_path):
    path = tmp_path / "set.parquet"
    path.write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"set\.parquet: not a readable Parquet file"):
        list(read_rows(str(path)))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": "a", "answer"', "not valid JSON"),
        ("[1, 2]", "got list"),
        ("null", "got NoneType"),
        ({"answer": "1"}, "prompt is missing"),
        ({"prompt": "  ", "answer": "1"}, "prompt is '  '"),
        ({"prompt": [], "answer": "1"}, r"prompt is \[\]"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "prompt is .*each with a role and a content"),
        ({"prompt": [*CHAT, "hello"], "answer": "1"}, "prompt is .*hello"),
        ({"prompt": 5, "answer": "1"}, "prompt is 5"),
        ({"prompt": "a"}, "answer is missing"),
        ({"prompt": "a", "answer": ""}, "answer is ''"),
        ({"prompt": "a", "answer": True}, "answer is True"),
        ({"prompt": "a", "answer": ["1", "2"]}, r"answer is \['1', '2'\], a list of 2"),
        ({"prompt": "a", "answer": []}, r"answer is \[\], a list of 0"),
        ({"prompt": "a", "answer": '["1", "2"]'}, "a list of 2"),
        ({"prompt": "a", "answer": [["1"]]}, "a list of 1"),
        ({"prompt": "a", "answer": [""]}, "answer is ''"),
        ({"prompt": "a", "reward_model": {"style": "rule"}}, "answer is missing"),
    ],
)
def test_a_malformed_line_is_named_by_file_and_line(tmp_path, line, complaint):
    path = jsonl(tmp_path, {"prompt": "fine", "answer": "1"}, "", line)
    with pytest.raises(DataError, match=rf"set\.jsonl:3: .*{complaint}"):
        list(read_rows(path))


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "1"}\n\xff\xfe\n')
    with pytest.raises(DataError, match=r"set\.jsonl:2: not UTF-8 text"):
        list(read_rows(str(path)))


def test_a_long_value_is_cut_in_the_message(tmp_path):
    path = jsonl(tmp_path, {"prompt": "a", "answer": ["1" * 5000, "2"]})
    with pytest.raises(DataError) as caught:
        list(read_rows(path))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_is_an_error(tmp_path, content):
    path = tmp_path / "set.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=r"set\.jsonl: holds no rows"):
        list(read_rows(str(path)))


def test_missing_files_and_other_endings_are_errors(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        list(read_rows(str(tmp_path / "absent.jsonl")))
    (tmp_path / "set.tsv").write_text("a,b\n")
    with pytest.raises(DataError, match=r"'\.tsv', expected \.jsonl, \.json, \.parquet, \.csv"):
        list(read_rows(str(tmp_path / "set.tsv")))


@pytest.mark.parametrize("name", ["aime24", "dapo-math-17k", "olympiadbench"])
def test_an_empty_file_of_a_known_set_is_named(tmp_path, name):
    (tmp_path / "set.jsonl").write_text("")
    with pytest.raises(DataError, match=r"set\.jsonl: holds no rows"):
        list(read_rows(f"{name}={tmp_path / 'set.jsonl'}"))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"unknown data set 'aime42'; perhaps you meant 'aime2[45]'; known: dapo-math"
    ):
        list(read_rows("aime42"))


def test_where_rows_come_from():
    assert source.origin_of(parse_dataset("mine=/data/x.jsonl", "data")) == "/data/x.jsonl"
    pinned = source.origin_of(parse_dataset("olympiadbench", "data"))
    assert pinned == "Hothan/OlympiadBench/OE_TO_maths_en_COMP@91184b52131e7fc9455fef848035173aea8cc01a:train"
    assert source.origin_of(parse_dataset("math500@abcdef1", "data")) == "HuggingFaceH4/MATH-500@abcdef1:test"
    files = "livecodebench/code_generation_lite@0fe84c3912ea0c4d4a78037083943e8f0c4dd505"
    assert source.origin_of(parse_dataset("livecodebench", "data")) == files


def test_a_path_alone_is_rows_of_ones_own_whatever_the_file_is_called(tmp_path):
    (row,) = read_rows(jsonl(tmp_path, {"prompt": "1+1?", "answer": "2"}, name="aime24.jsonl"))
    assert (row.question, row.is_bare, row.source) == ("1+1?", False, "aime24")


@pytest.mark.parametrize("template", [BOXED_TEMPLATE, DAPO_TEMPLATE])
def test_a_question_is_read_out_of_the_instructions_of_this_project(tmp_path, template):
    question = "Find $x$.\n\nPlease do it twice."
    filled = fill_template(template, question)
    chat = [{"role": "system", "content": "Think."}, {"role": "user", "content": filled.replace("\n", " \n ")}]
    prompts = [filled, f"\n {filled[:-1]}\n", chat]
    found = read_rows(jsonl(tmp_path, *({"prompt": prompt, "answer": "2"} for prompt in prompts)))
    assert ["".join(row.question.split(" ")) for row in found] == [question.replace(" ", "")] * 3


@pytest.mark.parametrize("template", [BOXED_TEMPLATE, DAPO_TEMPLATE])
def test_what_only_resembles_an_instruction_stays_in_the_question(tmp_path, template):
    texts = [
        fill_template(template, ""),
        fill_template(template, "1+1?") + " Thanks",
        template.replace("final", "")[9:],
    ]
    found = read_rows(jsonl(tmp_path, *({"prompt": text, "answer": "2"} for text in texts)))
    assert [row.question for row in found] == texts
