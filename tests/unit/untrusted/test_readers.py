"""What a file that anybody may have written makes of itself: its value, or one line."""

import json
import os
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import pytest

from gtpo_megatron.errors import CheckpointError, ConfigError, DataError
from gtpo_megatron.untrusted import json_text, text
from gtpo_megatron.untrusted.fields import Fields, as_record
from gtpo_megatron.untrusted.json_text import find_json, parse_json, read_json, read_json_lines
from gtpo_megatron.untrusted.text import bare_name, find_text, printable, read_bytes, read_text, shown
from gtpo_megatron.untrusted.yaml_text import parse_yaml, read_yaml, written_yaml


def refused(call, *arguments, error=DataError, **options):
    with pytest.raises(error) as raised:
        call(*arguments, error=error, **options)
    message = str(raised.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


GOOD_JSON = [
    (b'{"a": [1, 2.5, null, true], "b": {"c": "\xc3\xa4"}}', {"a": [1, 2.5, None, True], "b": {"c": "ä"}}),
    (b'\xef\xbb\xbf{"a": 1}\r\n', {"a": 1}),
    (b'"\\ud83d\\ude00"', "\U0001f600"),
    (b"9" * 300, int("9" * 300)),
    (b"[" * 64 + b"]" * 64, json.loads("[" * 64 + "]" * 64)),
    (json.dumps("[{" * 500).encode(), "[{" * 500),  # brackets in a text are no depth
]


@pytest.mark.parametrize(("content", "value"), GOOD_JSON)
def test_json_that_is_read(tmp_path, content, value):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    assert read_json(path) == find_json(path) == parse_json(content, "here") == value


BAD_JSON = [
    (b"", "not valid JSON: Expecting value"),
    (b"{", "not valid JSON"),
    (b"\n\n{,}", "line 3 column 2"),
    (b"\x00\xff\x93", "not UTF-8 text"),
    (b"\x93NUMPY", "not UTF-8 text"),
    ('{"a": 1}'.encode("utf-16"), "not UTF-8 text"),
    (b'{"a": 1, "b": 2, "a": 3}', "'a' is there twice"),
    (b'{"x": {"a": 1, "a": 1}}', "'a' is there twice"),
    (b"1" * 5000, "integer of 5000 digits"),
    (b"1" * 301, "integer of 301 digits"),
    (b"[" * 200_000, "nested more than 64"),
    (b'{"a":' * 65 + b"1" + b"}" * 65, "nested more than 64"),
    (b"[" * 65 + b"]" * 65, "nested more than 64"),
    (b'"\\ud800"', "half a surrogate pair"),
    (b'{"\\udfff": 1}', "half a surrogate pair"),
]


@pytest.mark.parametrize(("content", "words"), BAD_JSON)
def test_json_that_is_refused(tmp_path, content, words):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    for error in (DataError, ConfigError, CheckpointError):
        message = refused(read_json, path, error=error)
        assert message.startswith(f"{path}: ")
        assert words in message
    if content.strip() and b"\n" not in content:
        path.write_bytes(b"1\n\n" + content)
        with pytest.raises(DataError, match=r"a\.json:3: "):
            list(read_json_lines(path))


def test_half_a_pair_in_a_sampled_text(tmp_path):
    assert parse_json('"\\ud800"', "here", half_pairs=True) == "\ud800"


GOOD_YAML = [
    ("a: 1e-6\nb: 1E5\nc: -2.5e+3\nd: .5e1\ne: 1.e3", {"a": 1e-6, "b": 1e5, "c": -2500.0, "d": 5.0, "e": 1000.0}),
    ("a: 1\nb: 1.5\nc: .5\nd: -3", {"a": 1, "b": 1.5, "c": 0.5, "d": -3}),
    (
        "a: e5\nb: 1e\nc: '1e-6'\nd: 1e5x\ne: step_1e3",
        {"a": "e5", "b": "1e", "c": "1e-6", "d": "1e5x", "e": "step_1e3"},
    ),
    ("a: {b: [x, null, true]}", {"a": {"b": ["x", None, True]}}),
    ("\ufeffa: 1", {"a": 1}),
]


@pytest.mark.parametrize(("content", "value"), GOOD_YAML)
def test_yaml_that_is_read(tmp_path, content, value):
    path = tmp_path / "a.yaml"
    path.write_text(content, encoding="utf-8")
    found = read_yaml(path)
    assert found == value
    assert [type(one) for one in found.values()] == [type(one) for one in value.values()]


BAD_YAML = [
    ("a: 1\nb: 2\na: 3", "'a' is there twice at line 3"),
    ("x:\n  a: 1\n  a: 1", "'a' is there twice"),
    ("a: &x 1\nb: *x", "anchors"),
    (
        "a: &a [x]\n" + "".join(f"{c}: &{c} [*{p}, *{p}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)),
        "anchors",
    ),
    ("<<: {a: 1}", "is no text"),
    ("1: 2", "is no text"),
    ("? [a]\n: 1", "is no text"),
    ("a: b: c", "line 1"),
    ("a: [", "line 1"),
    ("\x00\x01", "not allowed"),
    ("- " * 30_000 + "x", "nested more than 64"),
    ("[" * 200_000, "nested more than 64"),
    ("{a: " * 65, "nested more than 64"),
    (f"a: {'1' * 5000}", "not valid YAML"),
    (f"a: 0x{'f' * 5000}", "integer of more than 300 digits"),
    ("a: 2024-99-99", "timestamp"),
    ("a: 2024-01-01", "put text into quotes"),
    ("a: !!binary x", "binary"),
    ("a: !!set {x}", "set"),
    ("a: !!int x", "not valid YAML"),
    ("a: !!float {}", "not valid YAML"),
    ("a: !!python/object/apply:os.system [echo]", "put text into quotes"),
    ("a: !!bool x", "not valid YAML"),
    ("--- 1\n--- 2", "not valid YAML"),
    ("x" * ((1 << 20) + 1), "larger than"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("content", "words"), BAD_YAML)
def test_yaml_that_is_refused(tmp_path, content, words):
    path = tmp_path / "a.yaml"
    path.write_text(content, encoding="utf-8")
    message = refused(read_yaml, path, error=ConfigError)
    assert message.startswith(f"{path}: ")
    assert words in message
    assert words in refused(parse_yaml, content, "here")


@pytest.mark.parametrize(
    "read", [read_text, read_json, read_yaml, lambda path, error: list(read_json_lines(path, error=error))]
)
def test_what_is_no_file(tmp_path, read):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("1")
    for name, words in (
        ("folder", "is a folder"),
        ("pipe", "is a pipe"),
        ("absent", "no such file"),
        ("file/below", "no such file"),
        ("loop", "cannot be read"),
        ("x" * 300, "cannot be read: File name too long"),
        ("a\0b", "cannot be read"),
        ("two\nlines", "two lines: cannot be read: no such file"),
    ):
        message = refused(read, tmp_path / name, error=ConfigError)
        assert words in message
        assert "\n" not in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("1")
    path.chmod(0)
    assert "cannot be read: Permission denied" in refused(read_json, path)


def test_an_absent_file_is_none_where_it_may_be_absent(tmp_path):
    assert find_text(tmp_path / "absent") is None
    assert find_json(tmp_path / "absent") is None
    assert "is a folder" in refused(find_text, tmp_path)


def test_sizes_are_limited(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text('"short"\n"' + "x" * 100 + '"\n')
    assert "larger than 10 bytes" in refused(read_bytes, path, limit=10)
    monkeypatch.setattr(text, "MAX_LINE_BYTES", 50)
    with pytest.raises(DataError, match=r"a\.jsonl:2: a line of more than 50 bytes"):
        list(json_text.read_json_lines(path))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[]", "is [], expected an object"),
        ('{"size": "8"}', "size is '8', expected an integer"),
        ('{"size": 1e999}', "size is inf, expected an integer"),
        ('{"size": 1.5}', "size is 1.5, expected an integer"),
        ('{"size": true}', "size is True, expected an integer"),
        ('{"size": NaN}', "size is nan, expected an integer"),
        ('{"size": [[1]]}', "size is [[1]], expected an integer"),
        ('{"size": {"a": 1}}', "size is {'a': 1}, expected an integer"),
        ('{"size": 0}', "size is 0, expected from 1 to 100"),
        ('{"size": 101}', "size is 101, expected from 1 to 100"),
        ('{"size": null}', "lacks size"),
        ("{}", "lacks size"),
    ],
)
def test_a_key_of_another_kind(value, words):
    with pytest.raises(ConfigError) as raised:
        Fields(parse_json(value, "c.json"), "c.json", ConfigError).get("size", int, at_least=1, at_most=100)
    assert str(raised.value).startswith("c.json: ")
    assert words in str(raised.value)


def test_keys_of_the_right_kind():
    plain = '{"i": 3, "j": 4.0, "f": 2, "s": "x", "b": false, "m": {"a": "b"}, "l": [1, 2], "o": {"i": 1}, "n": null}'
    fields = Fields(parse_json(plain, "here"), "here")
    assert fields.get("i", int) == 3
    assert isinstance(fields.get("j", int), int)
    assert isinstance(fields.get("f", float), float)
    assert (fields.get("s", str), fields.get("b", bool), fields.get("n", int, 7)) == ("x", False, 7)
    assert fields.get("m", dict[str, str]) == {"a": "b"}
    assert fields.get("l", list[int]) == [1, 2]
    assert fields.fields("o").get("i", int) == 1
    assert fields.fields("n").raw == {}
    assert not fields.has("n")
    for wrong in (dict[str, int], list[str]):
        with pytest.raises(DataError):
            fields.get("m", wrong)
    with pytest.raises(DataError, match=r"l\[0\] is 1, expected text"):
        fields.get("l", list[str])


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int


@dataclass(frozen=True, kw_only=True)
class Record:
    name: str
    pace: float | None
    parts: dict[str, Inner]
    sizes: tuple[int, ...] = ()


def test_a_dataclass_from_its_object():
    good = {"name": "a", "pace": 1, "parts": {"x": {"size": 2, "new": 1}}, "sizes": [1, 2], "later": 0}
    assert as_record(Record, good, "here") == Record(name="a", pace=1.0, parts={"x": Inner(size=2)}, sizes=(1, 2))
    assert as_record(Record, good | {"pace": None}, "here").pace is None
    for change, words in (
        ({"name": 1}, "name is 1, expected text"),
        ({"pace": "x"}, "pace is 'x', expected a finite number"),
        ({"pace": float("inf")}, "pace is inf"),
        ({"parts": []}, "parts is [], expected an object"),
        ({"parts": {"x": 1}}, "parts: x: is 1, expected an object"),
        ({"parts": {"x": {}}}, "parts: x: lacks size"),
        ({"sizes": 3}, "sizes is 3, expected a list"),
    ):
        with pytest.raises(DataError) as raised:
            as_record(Record, good | change, "here")
        assert words in str(raised.value)


@pytest.mark.parametrize("name", ["step_6", "model-00001-of-00002.safetensors", ".hidden", "ä"])
def test_bare_names(name):
    assert bare_name(name, "here") == name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "a\0b", "a\nb", "x" * 256, None, 3, ["a"], {}, "\ud800"],
)
def test_names_that_are_none(name):
    assert refused(bare_name, name, "here").startswith("here: got ")


def test_values_are_shown_in_one_short_line():
    for value in (
        "a\nb",
        "x" * 10**6,
        10**5000,
        [[[]]],
        [1] * 10**6,
        {"a": 1},
        float("nan"),
        "\ud800",
        None,
        [10**5000],
    ):
        assert len(shown(value)) <= 80
        assert shown(value).isprintable()
    assert printable("a\nb \x1b[31m\ud800") == "a b \\x1b[31m\\ud800"


def test_yaml_is_written_as_it_is_read():
    value = {
        "a": "1e-6",
        "b": 1e-6,
        "c": "1e3",
        "d": [1, 1.0, "x", None, True, "true", "2024-01-01", "<<", "=", "a\nb"],
    }
    assert parse_yaml(written_yaml(value), "here") == value


def test_reading_takes_memory_for_what_is_there_and_not_for_the_limit(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 1000)
    tracemalloc.start()
    try:
        assert read_bytes(tmp_path / "a", limit=1 << 30) == b"x" * 1000
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [0, 999, 1000, 1001, 5000])
def test_a_file_of_any_size_is_read_up_to_the_limit_whatever_it_says_of_its_size(tmp_path, monkeypatch, size):
    (tmp_path / "a").write_bytes(os.urandom(size))
    monkeypatch.setattr(text, "CHUNK_BYTES", 300)

    class Said:
        st_size = 0

    monkeypatch.setattr(os, "fstat", lambda _: Said)  # as of a file that grows, or of /proc
    if size > 1000:
        assert "larger than 1000 bytes" in refused(read_bytes, tmp_path / "a", limit=1000)
    else:
        assert read_bytes(tmp_path / "a", limit=1000) == (tmp_path / "a").read_bytes()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
def test_a_file_of_proc_is_read(tmp_path):
    assert b"VmRSS" in read_bytes(Path("/proc/self/status"))
