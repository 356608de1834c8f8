"""Loads of experts come back as they were written; anything else is one line."""

import pytest

from gtpo_megatron.errors import DataError
from gtpo_megatron.run_folder.expert_load import EXPERT_LOAD_FILE, ExpertLoad, read_expert_load, write_expert_load

LOAD = ExpertLoad(step=3, layers=[1, 2], tokens=[[4, 0, 2], [2, 2, 2]])


def test_what_is_written_is_read(tmp_path):
    assert read_expert_load(tmp_path) is None
    write_expert_load(tmp_path, ExpertLoad(step=2, layers=[0], tokens=[[1]]))
    write_expert_load(tmp_path, LOAD)
    assert read_expert_load(tmp_path) == LOAD


def test_a_disk_that_fails_does_not_end_the_run(tmp_path, caplog):
    write_expert_load(tmp_path / "absent", LOAD)
    assert "loads of experts were not written, training goes on" in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"step": 3}',
        '{"step": "3", "layers": [0], "tokens": [[1]]}',
        '{"step": 3, "layers": [0, 1], "tokens": [[1]]}',
        '{"step": 3, "layers": [], "tokens": []}',
        '{"step": 3, "layers": [0, 1], "tokens": [[1, 2], [3]]}',
        '{"step": 3, "layers": [0], "tokens": [[-1]]}',
        '{"step": 3, "layers": [0], "tokens": [[0.5]]}',
        '{"step": 3, "layers": [0], "tokens": [[]]}',
        "{",
    ],
)
def test_another_content_is_refused(tmp_path, text):
    (tmp_path / EXPERT_LOAD_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"expert_load\.json"):
        read_expert_load(tmp_path)
