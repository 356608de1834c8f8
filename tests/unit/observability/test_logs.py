import errno
import fcntl
import io
import logging
import os
import threading
import time
import warnings

import pytest
from rich.console import Console

from gtpo_megatron.observability import logs
from gtpo_megatron.observability.known_warnings import FILE_ONLY
from gtpo_megatron.observability.logs import LOG_FILE, PACKAGES, rank_prefix, set_up_logs
from gtpo_megatron.run_folder.provenance import log_provenance, logged_provenance, provenance
from recipes import tiny_cpu


@pytest.fixture(autouse=True)
def _logging_as_it_was():
    root = logging.getLogger()
    handlers, level, show = list(root.handlers), root.level, warnings.showwarning
    yield
    logging.captureWarnings(capture=False)
    warnings.showwarning = show
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    for package in PACKAGES:
        logging.getLogger(package).setLevel(logging.NOTSET)


def test_prefix():
    assert rank_prefix(3, tp=1, dp=0) == "[rank 3 tp1 dp0]"
    assert rank_prefix(0) == "[rank 0]"


def test_every_line_of_the_file_carries_the_rank(tmp_path, capsys):
    set_up_logs(run_folder=tmp_path, prefix=rank_prefix(3, tp=1, dp=0))
    logging.getLogger("gtpo_megatron.actor").info("ready in %d s", 4)
    logging.getLogger("some_library").warning("beware")
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert lines[0].endswith("INFO    [rank 3 tp1 dp0] gtpo_megatron.actor: ready in 4 s")
    assert lines[1].endswith("WARNING [rank 3 tp1 dp0] some_library: beware")
    assert "[rank 3 tp1 dp0] gtpo_megatron.actor: ready in 4 s" in capsys.readouterr().err


def test_what_is_logged_of_a_run_is_read_back(tmp_path):
    set_up_logs(run_folder=tmp_path)
    log_provenance(tiny_cpu.gtpo())
    assert logged_provenance(tmp_path / LOG_FILE) == provenance()


def test_our_level_is_configured_and_others_speak_from_warning_on(tmp_path):
    set_up_logs(level="DEBUG", run_folder=tmp_path)
    logging.getLogger("gtpo_megatron.x").debug("ours")
    logging.getLogger("some_library").info("theirs")
    text = (tmp_path / "log.txt").read_text()
    assert "ours" in text
    assert "theirs" not in text


def test_a_second_set_up_replaces_the_first(tmp_path):
    set_up_logs(run_folder=tmp_path / "first")
    set_up_logs(run_folder=tmp_path / "second")
    logging.getLogger("gtpo_megatron").warning("once")
    assert not (tmp_path / "first" / "log.txt").exists()
    assert (tmp_path / "second" / "log.txt").read_text().count("once") == 1


def test_a_terminal_shows_the_text_of_a_message_and_not_its_markup(tmp_path):
    stream = io.StringIO()
    set_up_logs(console=Console(file=stream, force_terminal=True, width=100, color_system=None), prefix="[rank 1]")
    logging.getLogger("gtpo_megatron").info("a list [bold]")
    assert "[rank 1] a list [bold]" in stream.getvalue()


def test_a_file_in_place_of_a_terminal_gets_plain_lines_on_stderr(capsys):
    stream = io.StringIO()
    set_up_logs(console=Console(file=stream))
    logging.getLogger("gtpo_megatron").info("hello")
    assert stream.getvalue() == ""
    assert capsys.readouterr().err.endswith("INFO    gtpo_megatron: hello\n")


def test_warnings_go_to_the_log(tmp_path):
    set_up_logs(run_folder=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=False)
        logging.captureWarnings(capture=True)
        warnings.warn("old api", UserWarning, stacklevel=1)
    assert "old api" in (tmp_path / "log.txt").read_text()


def test_the_terminal_has_each_warning_once_and_the_file_all(tmp_path, capsys):
    set_up_logs(run_folder=tmp_path)
    ours, theirs = logging.getLogger("gtpo_megatron.x"), logging.getLogger("some_library")
    for _ in range(3):
        theirs.warning("beware of %s", "this")
        ours.warning("beware of this")
        ours.info("step")
        ours.error("failed")
    text = capsys.readouterr().err
    assert text.count("beware of this") == 2  # of two loggers
    assert (text.count(": step"), text.count(": failed")) == (3, 3)
    assert (tmp_path / "log.txt").read_text().count("beware of this") == 6


def test_a_note_that_the_display_shows_is_in_the_file_only(tmp_path, capsys):
    set_up_logs(run_folder=tmp_path)
    logging.getLogger("gtpo_megatron.x").info("12 prompts are left out", extra=FILE_ONLY)
    assert capsys.readouterr().err == ""
    assert "12 prompts are left out" in (tmp_path / "log.txt").read_text()


@pytest.mark.slow
def test_a_line_is_appended_while_nobody_else_appends(tmp_path, monkeypatch):
    """Over NFS two machines would write over each other."""
    monkeypatch.setattr(logs, "LOCK_PATIENCE_S", 60.0)
    set_up_logs(run_folder=tmp_path)
    logging.getLogger("gtpo_megatron").info("first")
    with (tmp_path / LOG_FILE).open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # free between two lines
        line = threading.Thread(target=logging.getLogger("gtpo_megatron").info, args=("third",))
        line.start()
        time.sleep(0.3)
        other.write("second\n")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_UN)
        line.join(60)
    words = [line.split()[-1] for line in (tmp_path / LOG_FILE).read_text().splitlines()]
    assert words == ["first", "second", "third"]


def test_a_lock_that_stays_held_keeps_no_line_back(tmp_path):
    """By a process that was stopped, or a machine that was lost."""
    set_up_logs(run_folder=tmp_path)
    (tmp_path / LOG_FILE).touch()
    with (tmp_path / LOG_FILE).open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        logging.getLogger("gtpo_megatron").info("all the same")
        assert "all the same" in (tmp_path / LOG_FILE).read_text()


def test_a_disk_without_locks_gets_its_lines(tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    set_up_logs(run_folder=tmp_path)
    logging.getLogger("gtpo_megatron").info("all the same")
    assert "all the same" in (tmp_path / LOG_FILE).read_text()
