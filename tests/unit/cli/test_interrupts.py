"""Signals end any command in good order, once a request."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from gtpo_megatron.cli import dispatch
from gtpo_megatron.cli.command import Command
from gtpo_megatron.cli.interrupts import SIGNALS, interrupted_by_signals


@pytest.mark.parametrize("number", SIGNALS)
def test_a_command_cleans_up_and_says_what_it_leaves(monkeypatch, capsys, number):
    cleaned = []

    def works(_):
        try:
            os.kill(os.getpid(), number)
            pytest.fail("a signal of the system's comes at once")
        finally:
            os.kill(os.getpid(), number)  # the group's, of the same request: it does not interrupt the cleaning up
            cleaned.append(True)

    command = Command(usage="", run=works, interrupted="the same command goes on")
    monkeypatch.setitem(dispatch.COMMANDS, "convert", command)
    before = signal.getsignal(number)
    with interrupted_by_signals():
        status = dispatch.run(["convert"])
    name = "" if number is signal.SIGINT else f" by {number.name}"
    assert capsys.readouterr().err == f"gtpo-megatron: interrupted{name}; the same command goes on\n"
    assert (status, cleaned) == (128 + number, [True])
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", SIGNALS)
def test_an_interrupt_that_a_library_has_replaced_by_its_own_keeps_its_signal(monkeypatch, capsys, number):
    """As Ray does inside its calls."""

    def works(_):
        try:
            os.kill(os.getpid(), number)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None

    monkeypatch.setitem(dispatch.COMMANDS, "convert", Command(usage="", run=works))
    with interrupted_by_signals():
        assert dispatch.run(["convert"]) == 128 + number
    assert (number.name in capsys.readouterr().err) is (number is not signal.SIGINT)


def test_what_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupted_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_there_is_nothing_to_hear():
    done = []

    def listens():
        with interrupted_by_signals():
            done.append(True)

    thread = threading.Thread(target=listens)
    thread.start()
    thread.join()
    assert done == [True]


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_to_the_group_while_a_command_imports_is_one_line(tmp_path, number):
    """``timeout`` signals twice; the second comes while the command leaves."""
    code = f"""
import atexit, os, sys
from gtpo_megatron.cli import dispatch
from gtpo_megatron.cli.command import Command

def signalled(*_):
    os.kill(os.getpid(), {number.value})

dispatch.COMMANDS["convert"] = Command(usage="", run=signalled, interrupted="goes on")
atexit.register(signalled)
sys.argv[1:] = ["convert"]
dispatch.main()
"""
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert ended.returncode == 128 + number, ended.stderr
    assert ended.stderr.count("\n") == 1
