"""Loads of experts and the worst tokens, written and read again."""

import json
import math

import pytest

from gtpo_megatron.errors import DataError
from gtpo_megatron.run_folder.token_files import (
    EXPERT_LOAD_FILE,
    ExpertLoad,
    read_expert_load,
    write_expert_load,
    write_worst_tokens,
)

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


TOKEN = {"gap_nats": 2.5, "trainer_logprob": -3.0, "token_id": 7, "token": "7", "before": "1+6=", "engine": 1}


def write(folder, token=TOKEN):
    return write_worst_tokens(folder, policy_version=3, broken=("a", "b"), looks_like="positions", tokens=[token])


def test_what_is_written(tmp_path):
    path = write(tmp_path)
    found = json.loads(path.read_text())
    assert (found["policy_version"], found["broken"], found["looks_like"]) == (3, ["a", "b"], "positions")
    assert found["tokens"][0]["before"] == "1+6="
    assert found["tokens"][0]["gap_nats"] == 2.5


def test_a_log_prob_that_is_no_number_is_null(tmp_path):
    assert (
        json.loads(write(tmp_path, TOKEN | {"trainer_logprob": math.nan}).read_text())["tokens"][0]["trainer_logprob"]
        is None
    )


def test_a_disk_that_fails_is_a_warning(tmp_path, caplog):
    assert write(tmp_path / "absent") is None
    assert "was not written" in caplog.text
