"""Whom the chaos suite blames for shared memory that is left: tests beside it start engines of their own."""

import os
import subprocess
import sys
import time

import pytest

from gtpo_megatron.supervision.process_tree import SHARED_MEMORY
from tests.chaos.strangers import Strangers

LEAVES = """
import sys
from multiprocessing import resource_tracker, shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")  # so that it stays behind
print(memory.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def strangers(tmp_path):
    found = Strangers(tmp_path / "run")
    yield found
    found.close()


@pytest.mark.parametrize("is_of_run", [True, False])
def test_a_file_that_outlives_its_owner_is_the_runs_or_a_strangers(strangers, tmp_path, is_of_run):
    temp = tmp_path / ("run" if is_of_run else "other")
    temp.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", LEAVES],
        env={**os.environ, "TMPDIR": str(temp)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    name = process.stdout.readline().strip()
    try:
        deadline = time.monotonic() + 60
        while name not in strangers._decided and time.monotonic() < deadline:
            time.sleep(0.05)
        process.communicate()
        assert (SHARED_MEMORY / name).exists()
        assert (name in strangers.names) == (not is_of_run)
    finally:
        process.kill()
        (SHARED_MEMORY / name).unlink()


def test_what_is_there_already_is_nobodys(tmp_path):
    path = SHARED_MEMORY / f"psm_of_this_test_{os.getpid()}"
    path.touch()
    found = Strangers(tmp_path)
    try:
        assert path.name in found.names
    finally:
        found.close()
        path.unlink()
