"""Who has the folder, how often it was started, and how the last driver ended."""

import json
import os
import subprocess
import sys

import pytest

from gtpo_megatron.errors import DataError
from gtpo_megatron.run_folder import held_locks
from gtpo_megatron.run_folder import state as run_state


def test_the_lock_is_seen_from_outside_and_goes_with_its_process(tmp_path):
    assert not run_state.is_held(tmp_path)
    code = "import sys, pathlib; from gtpo_megatron.run_folder import state as r; "
    code += "r.acquire(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        assert run_state.is_held(tmp_path)
        assert run_state.acquire(tmp_path) is None
        other.kill()
        other.wait()
        assert not run_state.is_held(tmp_path)
        held_locks.let_go(run_state.acquire(tmp_path))


def test_starts_are_counted_and_an_end_is_recorded(tmp_path):
    run_state.record_start(tmp_path)
    with run_state.recorded_end(tmp_path) as ending:
        ending.outcome = run_state.FINISHED
    assert run_state.read_state(tmp_path).outcome == "finished"
    run_state.record_start(tmp_path)
    with pytest.raises(ValueError, match="of two"), run_state.recorded_end(tmp_path):
        raise ValueError("the first\nof two lines")
    state = run_state.read_state(tmp_path)
    assert (state.num_starts, state.pid, state.outcome) == (2, os.getpid(), "ValueError: the first")
    assert state.ended_at >= state.started_at


def test_a_record_that_cannot_be_read_is_said_and_counts_as_none(tmp_path):
    (tmp_path / run_state.STATE_FILE).write_text(json.dumps({"pid": 1}), encoding="utf-8")
    with pytest.raises(DataError, match=r"run_state\.json: lacks num_starts"):
        run_state.read_state(tmp_path)
    assert run_state.record_start(tmp_path).num_starts == 1
