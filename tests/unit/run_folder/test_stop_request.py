"""A file or a signal asks; another signal does not wait, unless it came together with the first."""

import os
import signal
import threading
import time

import pytest

from gtpo_megatron.run_folder import stop_request
from gtpo_megatron.run_folder.stop_request import (
    STOP_FILE,
    STOP_SIGNALS,
    Requests,
    StopAtOnce,
    StopRequest,
    interrupt,
    named_signal,
)


def test_nobody_asked(tmp_path):
    with StopRequest(tmp_path) as stop:
        assert stop.reason() == ""


@pytest.mark.parametrize(
    ("written", "reason"), [("time limit\n", "time limit"), ("", f"{STOP_FILE} in the run folder")]
)
def test_a_file_asks_and_is_gone_afterwards(tmp_path, written, reason):
    with StopRequest(tmp_path) as stop:
        (tmp_path / STOP_FILE).write_text(written, encoding="utf-8")
        assert stop.reason() == reason
    assert not (tmp_path / STOP_FILE).exists()


def test_a_file_that_cannot_be_read_stops_nothing_and_is_told_once(tmp_path, caplog):
    with StopRequest(tmp_path) as stop:
        (tmp_path / STOP_FILE).mkdir()
        assert [stop.reason(), stop.reason()] == ["", ""]
        assert caplog.text.count("cannot be read, so it stops nothing") == 1
    assert "is left, and stops the next start" in caplog.text


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_asks_and_is_given_back(tmp_path, number, caplog):
    before = signal.getsignal(number)
    with StopRequest(tmp_path) as stop:
        signal.signal(number, signal.SIG_DFL)  # a library that is imported later
        stop.listen()
        os.kill(os.getpid(), number)
        assert stop.reason() == number.name
        deadline = time.monotonic() + 5.0
        while f"{number.name}: the run saves itself" not in caplog.text:
            assert time.monotonic() < deadline, "whoever has pressed Ctrl-C is told that it was heard"
            time.sleep(0.01)
    assert signal.getsignal(number) == before


def test_what_is_ignored_under_nohup_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest(tmp_path) as stop:
            stop.listen()
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.reason() == ""
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("first", STOP_SIGNALS)
@pytest.mark.parametrize("second", STOP_SIGNALS)
def test_another_request_ends_at_once(tmp_path, monkeypatch, first, second):
    monkeypatch.setattr(stop_request, "SAME_REQUEST_S", 0.0)
    with StopRequest(tmp_path) as stop:
        os.kill(os.getpid(), first)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), second)
        assert stop.reason() == first.name


@pytest.mark.parametrize("first", STOP_SIGNALS)
def test_signals_that_come_together_are_one_request(tmp_path, first):
    """``timeout`` signals its child and the child's group; a shell and the kernel each tell of a closed terminal."""
    with StopRequest(tmp_path) as stop:
        for number in (first, first, *STOP_SIGNALS):
            os.kill(os.getpid(), number)
        assert stop.reason() == first.name


def test_a_request_begins_with_its_first_signal_and_is_over_after_a_while():
    times = iter([10.0, 11.9, 12.1, 13.0, 20.0])
    requests = Requests(lambda: next(times))
    assert [requests.is_new() for _ in range(5)] == [True, False, True, False, True]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_says_by_which_signal(number):
    assert named_signal(interrupt(number)) is number
    assert named_signal(KeyboardInterrupt()) is None, "Python's own"


@pytest.mark.parametrize("becomes", [None, SystemError])
def test_where_nothing_is_to_be_finished_the_first_signal_ends_at_once(tmp_path, becomes):
    """Ray turns an exception that comes inside one of its calls into one of its own."""

    def call():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except StopAtOnce as error:
            raise (becomes or error) from None

    with StopRequest(tmp_path) as stop:
        with pytest.raises(StopAtOnce), stop.at_once():
            call()
        assert stop.reason() == "SIGTERM"


def test_a_signal_that_has_come_before_is_not_waited_with(tmp_path):
    with StopRequest(tmp_path) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(StopAtOnce), stop.at_once():
            pytest.fail("nothing is begun")


def test_an_error_before_any_signal_is_an_error(tmp_path):
    with StopRequest(tmp_path) as stop, pytest.raises(SystemError), stop.at_once():
        raise SystemError


def test_outside_the_main_thread_only_the_file_is_heard(tmp_path):
    heard = []

    def listen():
        with StopRequest(tmp_path) as stop:
            (tmp_path / STOP_FILE).write_text("asked", encoding="utf-8")
            heard.append(stop.reason())

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert heard == ["asked"]
