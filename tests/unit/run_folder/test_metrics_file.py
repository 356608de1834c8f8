import json
import logging
import math

import pytest

from gtpo_megatron.errors import DataError
from gtpo_megatron.run_folder.metrics_file import JsonlSink, read_metrics, truncate_after


def _write(path, steps):
    sink = JsonlSink(path)
    for step in steps:
        sink.write(step, {"policy/loss": step / 7, "optimizer/grad_norm": 1 / (step + 3)})
    sink.close()


def test_one_line_a_step_with_sorted_keys_and_all_digits(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _write(path, [0, 1])
    lines = path.read_text().splitlines()
    assert lines[1] == f'{{"step": 1, "optimizer/grad_norm": 0.25, "policy/loss": {1 / 7!r}}}'
    assert json.loads(lines[1])["policy/loss"] == 1 / 7


def test_a_killed_and_resumed_run_gives_the_bytes_of_an_unbroken_one(tmp_path):
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    _write(whole, range(1, 8))
    _write(broken, range(1, 6))
    with broken.open("a") as file:
        file.write('{"step": 6, "policy/lo')  # killed in mid-line
    assert truncate_after(broken, 3) == 3  # steps 4 and 5, and the cut line
    _write(broken, range(4, 8))
    assert broken.read_bytes() == whole.read_bytes()


def test_truncation_keeps_the_file_as_it_is_where_nothing_is_later(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _write(path, [1, 2])
    before = path.read_bytes()
    assert truncate_after(path, 2) == 0
    assert path.read_bytes() == before
    assert truncate_after(tmp_path / "none.jsonl", 2) == 0


def test_cut_last_line_is_left_out_even_if_it_is_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _write(path, [1])
    with path.open("a") as file:
        file.write('{"step": 2}')  # no newline: the writer had not finished
    assert [row["step"] for row in read_metrics(path)] == [1]


@pytest.mark.parametrize("bad", ["{oops", "[1, 2]", '{"policy/loss": 1.0}', '{"step": "3"}'])
def test_a_bad_line_before_the_last_is_named(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{bad}\n{{"step": 3}}\n')
    for use in (read_metrics, lambda p: truncate_after(p, 1)):
        with pytest.raises(DataError, match=r"metrics\.jsonl:2: "):
            use(path)


def test_missing_file_is_said(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_nan_is_written_as_null_and_announced_once(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    with caplog.at_level(logging.WARNING, logger="gtpo_megatron"):
        sink.write(1, {"policy/loss": math.nan, "policy/ratio_max": math.inf})
        sink.write(2, {"policy/loss": math.nan, "policy/ratio_max": 1.0})
    sink.close()
    assert [row["policy/loss"] for row in read_metrics(path)] == [None, None]
    assert read_metrics(path)[0]["policy/ratio_max"] is None
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 2
    assert "policy/loss is nan" in warned[0]
    assert "policy/ratio_max is inf" in warned[1]


def test_a_line_is_on_disk_before_write_returns(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, {"policy/loss": 0.5})
    assert read_metrics(path) == [{"step": 1, "policy/loss": 0.5}]
    sink.close()


def test_rows_share_the_texts_of_their_names(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _write(path, [1, 2, 3])
    first, *others = ({name: id(name) for name in row} for row in read_metrics(path))
    assert all(other == first for other in others)
