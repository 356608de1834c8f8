"""Commands whose output nobody reads any more: quiet, with the status that shells know."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from gtpo_megatron.cli.reader import exit_when_pipe_closes, output_may_be_lost

ROOT = Path(__file__).parents[3]
COMMAND = ("-m", "gtpo_megatron.cli")


@pytest.mark.slow
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
    with pytest.raises(BrokenPipeError), exit_when_pipe_closes():
        raise BrokenPipeError("of a worker")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_run_whose_reader_has_left_goes_on(monkeypatch, stream):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as nobody_reads:
        monkeypatch.setattr(sys, stream, nobody_reads)
        with output_may_be_lost():
            for _ in range(3):
                print("a line", file=getattr(sys, stream), flush=True)
        assert getattr(sys, stream) is nobody_reads


def test_a_run_whose_terminal_was_closed_goes_on():
    controller, terminal = pty.openpty()
    os.close(controller)
    code = "from gtpo_megatron.cli.reader import output_may_be_lost as lost\nwith lost(): print('a line', flush=True)"
    ended = subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, stdout=terminal, stderr=subprocess.PIPE)
    os.close(terminal)
    assert (ended.returncode, ended.stderr) == (0, b"")
