import json
from dataclasses import replace

import pytest

from gtpo_megatron.companions.evaluate.evaluation_run import AnswerFinder
from gtpo_megatron.errors import ConfigError, DataError
from tests.unit.companions.evaluate.makers import IDENTITY, graded, measured_set, open_file, saved_verdicts


def written(folder, *verdicts):
    file = open_file(folder)
    for verdict in verdicts:
        file.append(verdict)
    file.close()
    return file


def lines(folder):
    return (folder / "verdicts.jsonl").read_text().splitlines(keepends=True)


def verdicts(folder):
    return saved_verdicts(folder / "verdicts.jsonl")


def test_what_is_written_is_there_when_it_is_opened_again(tmp_path):
    written(tmp_path, graded("x-a", 0, reward=1.0, answer="é 7"), graded("y-b", 3, failure="no"))
    again = open_file(tmp_path)
    assert set(again.verdicts) == {("x", "x-a", 0), ("y", "y-b", 3)}
    first, second = again.verdicts.values()
    assert (first.reward, first.response) == (1.0, ""), "texts stay on the disk"
    assert second.response == "text 3", "but for what is graded again"
    assert (again.has_verdict(first.key), again.has_verdict(second.key)) == (True, False)
    assert not again.has_verdict(("x", "x-a", 1))
    again.append(graded("x-c", 0))
    again.close()
    assert [one.response for one in verdicts(tmp_path)] == ["text 0", "text 3", "text 0"]


def test_every_line_says_what_it_was_measured_with(tmp_path):
    """Sessions stand before their verdicts, and the last one counts for what a benchmark is."""
    file = open_file(tmp_path)
    file.begin_session({"commit": "abc"}, {"x": measured_set("x", 2)})
    file.append(graded("x-0"))
    later = replace(measured_set("x", 2), contamination={"against": "t", "matches": []})
    file.begin_session({"commit": "def"}, {"x": later, "y": measured_set("y", 1)})
    file.close()
    kinds = [next(iter(json.loads(line))) for line in lines(tmp_path)]
    assert kinds == ["evaluation", "session", "benchmark", "session"]
    again = open_file(tmp_path)
    assert again.sets == file.sets == {"x": later, "y": measured_set("y", 1)}
    sessions = [{"commit": "abc", "benchmarks": ["x"]}, {"commit": "def", "benchmarks": ["x", "y"]}]
    assert again.sessions == file.sessions == sessions


def test_problems_are_complete_when_all_their_samples_are_there(tmp_path):
    file = written(tmp_path, graded("x-0", 1), graded("x-0", 0), graded("x-1", 0), graded("y-0", 1))
    (row,) = file.complete("x", ["x-0", "x-1", "x-2"], 2)
    assert [one.sample for one in row] == [0, 1]
    assert len(file.complete("x", ["x-1", "x-0"], 1)) == 2


@pytest.mark.parametrize("cut", [1, 20, 150])
def test_a_line_that_a_crash_cut_short_is_dropped(tmp_path, cut, caplog):
    path = written(tmp_path, graded("x-a"), graded("x-b")).path
    path.write_bytes(path.read_bytes()[:-cut])
    again = open_file(tmp_path)
    assert set(again.verdicts) == {("x", "x-a", 0)}
    assert "cut short" in caplog.text
    again.append(graded("x-b"))
    again.close()
    assert [one.problem_id for one in verdicts(tmp_path)] == ["x-a", "x-b"]


def test_a_long_line_that_was_cut_is_dropped_too(tmp_path):
    path = written(tmp_path, graded("x-a"), graded("x-b", answer="9" * 300_000)).path
    path.write_bytes(path.read_bytes()[:-10])
    assert set(open_file(tmp_path).verdicts) == {("x", "x-a", 0)}


def test_a_header_that_was_cut_starts_anew(tmp_path):
    path = written(tmp_path).path
    path.write_bytes(path.read_bytes()[:-5])
    file = open_file(tmp_path)
    file.append(graded("x-a"))
    file.close()
    assert set(open_file(tmp_path).verdicts) == {("x", "x-a", 0)}
    assert json.loads(lines(tmp_path)[0]) == {"evaluation": IDENTITY}


def test_of_a_response_that_is_graded_again_the_later_line_counts_and_nothing_is_rewritten(tmp_path):
    file = written(tmp_path, graded("x-a", failure="no"), graded("x-b", reward=1.0), graded("x-a", reward=1.0))
    assert file.verdicts["x", "x-a", 0].reward == 1.0
    again = open_file(tmp_path)
    assert again.verdicts == file.verdicts
    again.close()
    assert [(one.problem_id, one.failure) for one in verdicts(tmp_path)] == [
        ("x-a", "no"), ("x-b", None), ("x-a", None)
    ]  # fmt: skip
    assert [entry.name for entry in tmp_path.iterdir()] == [file.path.name]


def test_answers_that_are_missing_are_found_when_there_is_a_function_for_them(tmp_path):
    """It may be new, or have been mended; what has an answer is not looked at again."""
    path = written(tmp_path, graded("x-a", 0), graded("x-a", 1, answer="7"), graded("x-b", 0)).path
    before, looked_at = path.read_bytes(), []

    def answer_in(text):
        looked_at.append(text)
        return text.split()[-1] if len(looked_at) == 1 else None

    again = open_file(tmp_path, answer_in)
    assert looked_at == ["text 0", "text 0"]
    assert [one.answer for one in again.verdicts.values()] == ["0", "7", None]
    again.close()
    assert path.read_bytes() == before


def test_a_function_that_breaks_on_what_is_there_is_said_once(tmp_path, caplog):
    written(tmp_path, graded("x-a", 0), graded("x-a", 1))

    def final_answer(text):
        raise IndexError(text)

    assert open_file(tmp_path, AnswerFinder(final_answer)).verdicts["x", "x-a", 0].answer is None
    assert caplog.text.count("final_answer raised IndexError('text 0')") == 1


def test_responses_of_something_else_are_refused_and_the_difference_is_named(tmp_path):
    path = written(tmp_path, graded("x-a")).path
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"holds another evaluation: seed: 1 -> 2; choose another --output"):
        open_file(tmp_path, seed=2)
    with pytest.raises(ConfigError, match=r"more: None -> 'x'; sampling: "):
        open_file(tmp_path, sampling={"temperature": 0.5}, more="x")
    assert path.read_bytes() == before


def test_a_fingerprint_of_an_earlier_version_is_said_to_be_one(tmp_path):
    open_file(tmp_path / "old", model="0ff1ce").close()
    with pytest.raises(ConfigError, match=r"'tensors:0ff1ce', where the first is of an earlier version, .*; choose"):
        open_file(tmp_path / "old", model="tensors:0ff1ce")
    open_file(tmp_path / "new", model="tensors:a").close()
    with pytest.raises(ConfigError, match=r"model: 'tensors:a' -> 'tensors:b'; choose"):
        open_file(tmp_path / "new", model="tensors:b")


def test_another_data_set_of_the_same_name_is_refused(tmp_path):
    file = open_file(tmp_path)
    file.check_content("x", "c0")
    file.begin_session({}, {"x": measured_set("x", 2)})
    file.check_content("x", "c0")
    file.check_content("y", "c1")
    with pytest.raises(ConfigError, match=r"holds another evaluation of x: content: 'c0' -> 'c1'; choose another"):
        file.check_content("x", "c1")


@pytest.mark.parametrize(
    "line", ["not json", "[]", '{"problem_id": "a"}', '{"session": {}}', '{"session": {"benchmarks": {"x": 1}}}']
)
def test_damage_in_the_middle_is_named(tmp_path, line):
    path = written(tmp_path, graded("x-a")).path
    path.write_text(path.read_text() + line + "\n" + json.dumps({"x": 1}) + "\n")
    with pytest.raises(DataError, match=r"verdicts\.jsonl:3: .*choose another --output"):
        open_file(tmp_path)


def test_a_file_that_is_none_of_ours(tmp_path):
    (tmp_path / "verdicts.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(DataError, match=r"verdicts\.jsonl:1: is no header of an evaluation; choose another --output"):
        open_file(tmp_path)


def test_half_a_surrogate_pair_is_written_and_read_again(tmp_path):
    """A JSONL file may hold one in an id, and a response may repeat it."""
    half = "\ud83d"
    written(tmp_path, graded(f"x-{half}", 0, answer=half), graded("x-b", 0, answer="é"))
    assert open_file(tmp_path).verdicts["x", f"x-{half}", 0].answer == half
    assert [one.answer for one in verdicts(tmp_path)] == [half, "é"]


def test_parts_and_what_the_reward_said_are_in_the_file(tmp_path):
    file = open_file(tmp_path)
    file.append(graded("x-0", parts={"tests_passed": 0.5}, info='{"said": "half"}'))
    file.append(graded("x-1"))
    file.close()
    first, second = (json.loads(line) for line in file.path.read_text().splitlines()[1:])
    assert (first["parts"], first["info"]) == ({"tests_passed": 0.5}, '{"said": "half"}')
    assert "parts" not in second
    again = open_file(tmp_path)
    again.close()
    assert again.verdicts["x", "x-0", 0].parts == {"tests_passed": 0.5}


def test_why_a_request_was_refused_stays_at_hand(tmp_path):
    told = {"info": '{"refused": "n=2"}'}
    file = written(
        tmp_path,
        graded("x-0", 0, parts={"requests_refused": 1.0}, **told),
        graded("x-0", 1, parts={"requests_refused": 0.0}, **told),
    )
    assert [file.verdicts["x", "x-0", sample].info for sample in (0, 1)] == [told["info"], ""]


def session_of(folder, source, *verdicts):
    """A command that graded these with a reward function whose file has this digest."""
    file = open_file(folder, reward_source=source)
    file.begin_session({"commit": "c"}, {"x": measured_set("x", 2)})
    for verdict in verdicts:
        file.append(verdict)
    file.close()
    return file


def test_verdicts_of_another_source_of_the_reward_function_are_none(tmp_path):
    session_of(tmp_path, "a1", graded("x-0", 0, reward=1.0, answer="7"), graded("x-1", 0, reward=1.0))
    assert open_file(tmp_path, reward_source="a1").outdated == {}
    edited = open_file(tmp_path, reward_source="b2")
    assert edited.verdicts == {}
    assert [(one.problem_id, one.response) for one in edited.outdated.values()] == [
        ("x-0", "text 0"),
        ("x-1", "text 0"),
    ]
    assert not edited.has_verdict(("x", "x-0", 0))
    assert edited.complete("x", ["x-0", "x-1"], 1) == [], "no figure is of them"
    edited.close()
    again = session_of(tmp_path, "b2", graded("x-0", 0, reward=0.5))
    assert [list(one) for one in (again.verdicts, again.outdated)] == [[("x", "x-0", 0)], [("x", "x-1", 0)]]
    last = open_file(tmp_path, reward_source="b2")
    assert (last.verdicts, last.outdated) == (again.verdicts, again.outdated)
    assert [session["reward_source"] for session in last.sessions] == ["a1", "b2"]
    first = open_file(tmp_path, reward_source="a1")
    assert list(first.outdated) == [("x", "x-0", 0)], "the later line counts"


def test_answers_in_outdated_responses_are_searched_again(tmp_path):
    """The function that finds them may stand in the file that was edited."""
    session_of(tmp_path, "a1", graded("x-0", 0, answer="7"))
    assert open_file(tmp_path, str.upper, reward_source="b2").outdated["x", "x-0", 0].answer == "TEXT 0"
    assert open_file(tmp_path, str.upper, reward_source="a1").verdicts["x", "x-0", 0].answer == "7"


def test_a_session_that_does_not_say_its_source_is_taken_as_it_is(tmp_path):
    session_of(tmp_path, "", graded("x-0", 0, reward=1.0))
    assert "reward_source" not in lines(tmp_path)[1]
    assert open_file(tmp_path, reward_source="a1").has_verdict(("x", "x-0", 0))
