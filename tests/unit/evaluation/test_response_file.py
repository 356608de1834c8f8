import errno
import json

import pytest

from gtpo_megatron.errors import ConfigError, DataError
from gtpo_megatron.evaluation import response_file
from gtpo_megatron.evaluation.answers import AnswerFinder
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


def test_of_a_response_that_is_graded_again_the_later_line_counts_and_stays(path):
    file = written(path, graded("a", 0, failure="no"), graded("b", 0, reward=1.0), graded("a", 0, reward=1.0))
    assert file.responses["a", 0].reward == 1.0
    assert [(r.problem_id, r.failure) for r in read_responses(path)] == [("b", None), ("a", None)]
    assert json.loads(path.read_text().splitlines()[0]) == {"identity": IDENTITY}
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_after_a_crash_the_earlier_line_goes_when_the_file_is_opened(path):
    written(path, graded("a", 0, failure="no"), graded("b", 0))
    header, *lines = path.read_text().splitlines(keepends=True)
    later = lines[0].replace('"failure": "no"', '"failure": null')
    path.write_text(header + "".join(lines) + later + later[:-20])
    again = ResponseFile(path, IDENTITY)
    assert again.responses["a", 0].failure is None
    again.append(graded("c", 0))
    again.close()
    assert path.read_text().splitlines(keepends=True)[:3] == [header, lines[1], later]
    assert [r.problem_id for r in read_responses(path)] == ["b", "a", "c"]


def test_without_room_for_a_second_copy_the_file_stays_as_it_is(path, monkeypatch, caplog):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    file = written(path, graded("a", 0, failure="no"), graded("b", 0))
    with monkeypatch.context() as broken:
        file = ResponseFile(path, IDENTITY)
        file.append(graded("a", 0, reward=1.0))
        before = path.read_bytes()
        broken.setattr(response_file, "_line", full)
        file.close()
        assert ResponseFile(path, IDENTITY).responses["a", 0].reward == 1.0, "nor does the next one need it"
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert "keeps lines that no longer count" in caplog.text
    ResponseFile(path, IDENTITY).close()
    assert [(r.problem_id, r.failure) for r in read_responses(path)] == [("b", None), ("a", None)]


def test_answers_that_are_missing_are_found_when_there_is_a_function_for_them(path):
    """It may be new, or have been mended; what has an answer is not looked at again."""
    written(path, graded("a", 0), graded("a", 1, answer="7"), graded("b", 0))
    looked_at = []

    def answer_in(text):
        looked_at.append(text)
        return text.split()[-1] if len(looked_at) == 1 else None

    again = ResponseFile(path, IDENTITY, answer_in)
    assert looked_at == ["text 0", "text 0"]
    assert {key: r.answer for key, r in again.responses.items()} == {("a", 0): "0", ("a", 1): "7", ("b", 0): None}
    assert [r.answer for r in read_responses(path)] == ["0", "7", None], "the file says so too"
    assert [r.response for r in read_responses(path)] == ["text 0", "text 1", "text 0"]
    assert ResponseFile(path, IDENTITY).responses == again.responses


def test_a_function_that_breaks_on_what_is_there_leaves_the_file_as_it_is(path, caplog):
    written(path, graded("a", 0), graded("a", 1))
    before = path.read_bytes()

    def final_answer(text):
        raise IndexError(text)

    assert ResponseFile(path, IDENTITY, AnswerFinder(final_answer)).responses["a", 0].answer is None
    assert path.read_bytes() == before
    assert caplog.text.count("final_answer raised IndexError('text 0')") == 1


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
