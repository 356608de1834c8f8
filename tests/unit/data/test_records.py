"""Which files of a folder are read, and what a file of JSON holds."""

import json
from pathlib import Path

import pytest

from gtpo_megatron.config.problems import parse_dataset
from gtpo_megatron.data.records import read_records
from gtpo_megatron.data.source import read_rows
from gtpo_megatron.errors import DataError


def folder_of(folder, *names):
    """A folder of files, each with one row that is called as the file."""
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        row = {"problem": name, "answer": "2"}
        if file.suffix == ".parquet":
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), file)
        else:
            file.write_text(json.dumps(row) + "\n")
    return folder


def read(text):
    return [row.prompt for row in read_rows(parse_dataset(str(text), "data"))]


@pytest.mark.parametrize("split", ["", ":train", ":test", ":nosuch"])
def test_a_folder_of_splits_and_of_other_files_is_refused(tmp_path, split):
    """It was read whole, so that a run on its split ``train`` had the test problems too."""
    folder = folder_of(tmp_path / "d", "train.jsonl", "test.jsonl", "hard.jsonl")
    said = r"/d: the names of test\.jsonl, train\.jsonl say their split, those of hard\.jsonl say none; give one"
    with pytest.raises(DataError, match=said):
        read(f"{folder}{split}")


@pytest.mark.parametrize("text", ["gsm8k=%s", "gsm8k-test=%s", "gsm8k=%s:test"])
def test_a_known_set_is_not_read_from_such_a_folder(tmp_path, text):
    """The files of grade-school-math on GitHub."""
    folder = folder_of(tmp_path, "train.jsonl", "test.jsonl", "train_socratic.jsonl", "test_socratic.jsonl")
    with pytest.raises(
        DataError, match=r"say their split, those of test_socratic\.jsonl, train_socratic\.jsonl say none"
    ):
        read(text % folder)


@pytest.mark.parametrize("names", [["hard.jsonl"], ["easy.jsonl", "hard.jsonl"]])
def test_a_split_that_no_name_says_is_refused(tmp_path, names):
    folder = folder_of(tmp_path, *names)
    assert read(folder) == names
    with pytest.raises(
        DataError, match=r"no file of the split 'test': the names of .*hard\.jsonl say none; leave :test "
    ):
        read(f"{folder}:test")
    assert read(f"gsm8k={folder}") == names  # a known set's own split is nobody's wish
    with pytest.raises(DataError, match="no file of the split 'train'"):
        read(f"gsm8k={folder}:train")


@pytest.mark.parametrize(
    ("text", "found"), [("%s:train", "train"), ("%s:test", "test"), ("gsm8k=%s", "train"), ("gsm8k-test=%s", "test")]
)
@pytest.mark.parametrize(
    "form", ["%s.jsonl", "%s_0.jsonl", "%s-00000-of-00001.parquet", "%s/0000.parquet", "%s/a.jsonl"]
)
def test_splits_in_names_of_files_and_of_folders(tmp_path, text, found, form):
    folder = tmp_path / "d"
    for split in ("train", "test"):
        folder_of(folder, form % split)
    assert read(text % folder) == [form % found]


def test_a_folder_that_is_called_as_a_split_is_that_split(tmp_path):
    folder_of(tmp_path / "default", "train/0000.parquet", "train/0001.parquet")
    assert (
        read(tmp_path / "default") == read(f"{tmp_path}/default:train") == ["train/0000.parquet", "train/0001.parquet"]
    )
    with pytest.raises(DataError, match="has no split 'test'; it holds train"):
        read(f"{tmp_path}/default:test")
    assert read(tmp_path / "default" / "train") == ["train/0000.parquet", "train/0001.parquet"]


def test_files_that_seem_to_be_several_splits_are_not_read_together(tmp_path):
    folder = folder_of(tmp_path, "gsm8k_train.jsonl", "gsm8k_test.jsonl", "more.jsonl")
    for text in (folder, f"gsm8k={folder}"):
        with pytest.raises(
            DataError, match=r"gsm8k_test\.jsonl, gsm8k_train\.jsonl, more\.jsonl seem to be several splits"
        ):
            read(text)
    (folder / "gsm8k_test.jsonl").unlink()
    assert read(folder) == ["gsm8k_train.jsonl", "more.jsonl"]


def test_a_message_has_a_few_names(tmp_path):
    folder = folder_of(tmp_path, *(f"part{number}.jsonl" for number in range(9)))
    with pytest.raises(DataError, match=r"names of part0\.jsonl, .*part5\.jsonl, 3 more say none"):
        read(f"{folder}:train")


def test_a_known_set_of_named_files_is_read_from_those(tmp_path):
    """LiveCodeBench's releases are ``test.jsonl`` to ``test6.jsonl``, of which each is a part of the next."""
    for number in ("", *range(2, 7)):
        row = {"question_content": f"q{number}", "public_test_cases": "[]", "question_id": f"i{number}"}
        (tmp_path / f"test{number}.jsonl").write_text(json.dumps(row))
    (tmp_path / "stats.jsonl").write_text("{}")
    assert len(read(f"livecodebench={tmp_path}")) == 6
    [newest] = read(f"livecodebench-v6={tmp_path}")
    assert "q6" in newest
    (tmp_path / "test3.jsonl").unlink()
    with pytest.raises(DataError, match=r"test3\.jsonl"):
        read(f"livecodebench={tmp_path}")


LISTS = [{"problem": "1+1", "answer": "2", "examples": [{"input": "a"}]}, {"question": "q", "data": [1], "answer": "3"}]


@pytest.mark.parametrize("rows", [LISTS, LISTS[:1], LISTS[1:], [{"q": 1, "rows": [2]}, {"q": 2, "rows": []}]])
def test_a_list_in_a_row_of_json_lines_is_a_column(tmp_path, rows):
    """Its items were the rows if there was one line, and two lines were no JSON."""
    file = tmp_path / "set.json"
    file.write_text("\n".join(["", *map(json.dumps, rows), ""]))
    assert [record for _, record in read_records(str(file))] == rows


@pytest.mark.parametrize("key", ["data", "rows", "examples", "problems"])
@pytest.mark.parametrize("indent", [None, 2])
def test_an_object_around_the_rows_is_opened(tmp_path, key, indent):
    file = tmp_path / "set.json"
    file.write_text(json.dumps({"version": "1", key: LISTS}, indent=indent))
    assert [record for _, record in read_records(str(file))] == LISTS
    assert [Path(place).name for place, _ in read_records(str(file))] == ["set.json, row 1", "set.json, row 2"]
