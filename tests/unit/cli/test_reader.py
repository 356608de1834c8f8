"""Commands whose output nobody reads any more: quiet, with the status that shells know."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gtpo_megatron.cli.reader import hangs_up, reader_may_leave

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


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_run_whose_reader_has_left_is_asked_to_stop_once_and_goes_on_writing(monkeypatch, stream):
    reader, writer = os.pipe()
    os.close(reader)
    heard = []
    before = signal.signal(signal.SIGHUP, lambda *_: heard.append("SIGHUP"))
    with os.fdopen(writer, "w", encoding="utf-8") as nobody_reads:
        monkeypatch.setattr(sys, stream, nobody_reads)
        try:
            with hangs_up():
                for _ in range(3):
                    print("a line", file=getattr(sys, stream), flush=True)
            assert getattr(sys, stream) is nobody_reads
        finally:
            signal.signal(signal.SIGHUP, before)
    assert heard == ["SIGHUP"]


def test_what_is_written_to_a_closed_terminal_is_lost_without_an_error():
    controller, terminal = pty.openpty()
    os.close(controller)
    code = "from gtpo_megatron.cli import dispatch; import sys; sys.argv[1:] = ['--help']; dispatch.main()"
    ended = subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, stdout=terminal, stderr=subprocess.PIPE)
    os.close(terminal)
    assert (ended.returncode, ended.stderr) == (0, b"")
