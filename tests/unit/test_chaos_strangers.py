"""Whom the chaos suite blames for shared memory that is left: tests beside it start engines of their own."""

import os
import subprocess
import sys
import time

import pytest

from tests.chaos.strangers import Strangers

LEAVES = """
import mmap, sys
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 0)
print("is there", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def strangers(shared_memory, tmp_path):
    found = Strangers(tmp_path / "run")
    yield found
    found.close()


@pytest.mark.parametrize("is_of_run", [True, False])
def test_a_file_that_outlives_its_owner_is_the_runs_or_a_strangers(strangers, shared_memory, tmp_path, is_of_run):
    temp = tmp_path / ("run" if is_of_run else "other")
    temp.mkdir()
    path = shared_memory / "psm_of_this_test"
    process = subprocess.Popen(
        [sys.executable, "-c", LEAVES, str(path)],
        env={**os.environ, "TMPDIR": str(temp)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    process.stdout.readline()
    try:
        deadline = time.monotonic() + 60
        while path.name not in strangers._decided and time.monotonic() < deadline:
            time.sleep(0.05)
        process.communicate()
        assert path.exists()
        assert (path.name in strangers.names) == (not is_of_run)
    finally:
        process.kill()


def test_what_is_there_already_is_nobodys(shared_memory, tmp_path):
    path = shared_memory / "psm_of_this_test"
    path.touch()
    found = Strangers(tmp_path)
    try:
        assert path.name in found.names
    finally:
        found.close()
