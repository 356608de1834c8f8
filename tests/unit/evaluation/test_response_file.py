import json

import pytest

from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.evaluation.response_file import ResponseFile, contents_of, read_responses
from tests.unit.evaluation.makers import graded

IDENTITY = {"seed": 1, "sampling": {"temperature": 1.0}}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out" / "responses" / "aime24.jsonl"


def written(path, *responses):
    file = ResponseFile(path, IDENTITY)
    for response in responses:
        file.append(response)
    file.close()
    return file


def test_what_is_written_is_there_when_it_is_opened_again(path):
    written(path, graded("a", 0, reward=1.0, answer="é 7"), graded("b", 3, failure="no"))
    again = ResponseFile(path, IDENTITY)
    assert set(again.responses) == {("a", 0), ("b", 3)}
    assert again.responses["a", 0].reward == 1.0
    assert again.responses["a", 0].response == "", "texts stay on the disk"
    again.append(graded("c", 0))
    again.close()
    assert [response.response for response in read_responses(path)] == ["text 0", "text 3", "text 0"]


@pytest.mark.parametrize("cut", [1, 20, 150])
def test_a_line_that_a_crash_cut_short_is_dropped(path, cut, caplog):
    written(path, graded("a", 0), graded("b", 0))
    path.write_bytes(path.read_bytes()[:-cut])
    again = ResponseFile(path, IDENTITY)
    assert set(again.responses) == {("a", 0)}
    assert "cut short" in caplog.text
    again.append(graded("b", 0))
    again.close()
    assert [r.problem_id for r in read_responses(path)] == ["a", "b"]


def test_a_long_line_that_was_cut_is_dropped_too(path):
    written(path, graded("a", 0), graded("b", 0, answer="9" * 300_000))
    path.write_bytes(path.read_bytes()[:-10])
    assert set(ResponseFile(path, IDENTITY).responses) == {("a", 0)}


def test_a_header_that_was_cut_starts_anew(path):
    written(path)
    path.write_bytes(path.read_bytes()[:-5])
    file = ResponseFile(path, IDENTITY)
    file.append(graded("a", 0))
    file.close()
    assert set(ResponseFile(path, IDENTITY).responses) == {("a", 0)}


def test_responses_of_something_else_are_refused_and_the_difference_is_named(path):
    written(path, graded("a", 0))
    with pytest.raises(ConfigError, match=r"out holds another evaluation of aime24: seed: 1 -> 2; choose another"):
        ResponseFile(path, IDENTITY | {"seed": 2})
    with pytest.raises(ConfigError, match=r"more: None -> 'x'; sampling: "):
        ResponseFile(path, {"seed": 1, "sampling": {"temperature": 0.5}, "more": "x"})


@pytest.mark.parametrize("line", ["not json", "[]", '{"problem_id": "a"}'])
def test_damage_in_the_middle_is_named(path, line):
    written(path, graded("a", 0))
    path.write_text(path.read_text() + line + "\n" + json.dumps({"x": 1}) + "\n")
    with pytest.raises(DataError, match=r"aime24\.jsonl:3: .*choose another --output"):
        ResponseFile(path, IDENTITY)


def test_a_file_that_is_none_of_ours(path):
    path.parent.mkdir(parents=True)
    path.write_text('{"prompt": "x"}\n')
    with pytest.raises(DataError, match="is no header of an evaluation"):
        ResponseFile(path, IDENTITY)


def test_half_a_surrogate_pair_is_written_and_read_again(path):
    """A JSONL file may hold one in an id, and a response may repeat it."""
    half = "\ud83d"
    written(path, graded(f"a{half}", 0, answer=half), graded("b", 0, answer="é"))
    again = ResponseFile(path, IDENTITY)
    assert again.responses[f"a{half}", 0].answer == half
    assert [response.answer for response in read_responses(path)] == [half, "é"]


def test_a_folder_is_of_one_evaluation(tmp_path):
    """Other benchmarks than those wanted now count too: their figures stand in the same evaluation.json."""
    assert contents_of(tmp_path, {"model": "m"}) == {}
    for label in ("x", "y"):
        ResponseFile(tmp_path / "responses" / f"{label}.jsonl", {"model": "m", "seed": 1, "content": label}).close()
    assert contents_of(tmp_path, {"model": "m", "seed": 1}) == {"x": "x", "y": "y"}
    with pytest.raises(ConfigError, match=r"holds another evaluation of x: model: 'm' -> 'n'; choose another --output"):
        contents_of(tmp_path, {"model": "n", "seed": 1})
    with pytest.raises(ConfigError, match="seed: 1 -> 2"):
        contents_of(tmp_path, {"model": "m", "seed": 2})
    (tmp_path / "responses" / "x.jsonl").write_text('{"identity": {"mod')
    assert contents_of(tmp_path, {"model": "m", "seed": 1}) == {"y": "y"}
    (tmp_path / "responses" / "x.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"x\.jsonl:1: is no header"):
        contents_of(tmp_path, {"model": "m", "seed": 1})
