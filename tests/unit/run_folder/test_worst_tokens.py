"""The file of the worst tokens."""

import json
import math

from gtpo_megatron.run_folder.worst_tokens import WorstToken, write_worst_tokens

TOKEN = WorstToken(
    gap_nats=2.5, sampler_logprob=-0.5, trainer_logprob=-3.0, token_id=7, token="7", before="1+6=", after=".",
    group_id=4, row=9, position=0, prompt_length=12, response_length=2, policy_version=3, engine=1,
)  # fmt: skip


def write(folder, token=TOKEN):
    return write_worst_tokens(folder, policy_version=3, broken=("a", "b"), looks_like="positions", tokens=[token])


def test_what_is_written(tmp_path):
    path = write(tmp_path)
    found = json.loads(path.read_text())
    assert (found["policy_version"], found["broken"], found["looks_like"]) == (3, ["a", "b"], "positions")
    assert found["tokens"][0]["before"] == "1+6="
    assert found["tokens"][0]["gap_nats"] == 2.5


def test_a_log_prob_that_is_no_number_is_null(tmp_path):
    nan = WorstToken(**{name: getattr(TOKEN, name) for name in TOKEN.__slots__} | {"trainer_logprob": math.nan})
    assert json.loads(write(tmp_path, nan).read_text())["tokens"][0]["trainer_logprob"] is None


def test_a_disk_that_fails_is_a_warning(tmp_path, caplog):
    assert write(tmp_path / "absent") is None
    assert "was not written" in caplog.text
