"""A file or a signal asks; the second SIGTERM does not wait."""

import os
import signal
import threading

import pytest

from gtpo_megatron.run_folder.stop_request import STOP_FILE, StopAtOnce, StopRequest


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


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_asks_and_is_given_back(tmp_path, number):
    before = signal.getsignal(number)
    with StopRequest(tmp_path) as stop:
        signal.signal(number, signal.SIG_IGN)  # what Ray does to SIGTERM
        stop.listen()
        os.kill(os.getpid(), number)
        assert stop.reason() == number.name
    assert signal.getsignal(number) == before


def test_a_second_sigterm_ends_at_once(tmp_path):
    with StopRequest(tmp_path):
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


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
