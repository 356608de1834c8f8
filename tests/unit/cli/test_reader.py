"""Commands whose output nobody reads any more: quiet, with the status that shells know."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gtpo_megatron.cli.reader import reader_may_leave

ROOT = Path(__file__).parents[3]
COMMAND = ("-m", "gtpo_megatron.cli")


@pytest.mark.parametrize(
    "arguments",
    [
        (*COMMAND, "config", "recipes.tiny_cpu:gtpo"),
        pytest.param((*COMMAND, "--help"), marks=pytest.mark.slow),
        pytest.param((*COMMAND, "config", "recipes.tiny_cpu:gtpo", "--help"), marks=pytest.mark.slow),
        pytest.param(("-m", "launchers.local", "recipes.tiny_cpu:gtpo", "--help"), marks=pytest.mark.slow),
        pytest.param(("tools/convert_checkpoint.py", "--help"), marks=pytest.mark.slow),
    ],
)
def test_a_reader_that_has_left_is_no_error(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, *arguments]
    ended = subprocess.run(command, check=False, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_a_broken_pipe_of_something_else_is_raised(capfd):
    with pytest.raises(BrokenPipeError), reader_may_leave():
        raise BrokenPipeError("of a worker")
