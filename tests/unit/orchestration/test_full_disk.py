"""A disk that fills up while a run is on it: nothing good is hidden, nothing that can wait is lost."""

import logging
import resource
import subprocess
import threading
from contextlib import contextmanager

import pytest

from gtpo_megatron.cli import status as status_command
from gtpo_megatron.config.output import LoggingConfig
from gtpo_megatron.observability.logs import LOG_FILE, set_up_logs
from gtpo_megatron.observability.sinks import open_sinks
from gtpo_megatron.run_folder import metrics_file
from gtpo_megatron.run_folder import state as run_state
from gtpo_megatron.run_folder.folder import RunFolder
from gtpo_megatron.run_folder.metrics_file import JsonlSink, read_metrics
from recipes import tiny_cpu

QUIET = LoggingConfig(tensorboard=False)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of a quarter of a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs root, to mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def full(folder):
    """Not a byte is left meanwhile."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    yield
    filler.unlink()


@contextmanager
def files_of_at_most(num_bytes):
    """The kernel refuses longer files in this process, as it does on a full disk; works everywhere."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def steps(path):
    return [row["step"] for row in read_metrics(path)]


def test_rows_wait_until_they_fit(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    with caplog.at_level(logging.WARNING), open_sinks(tmp_path, QUIET, run_config={}) as sinks:
        sinks.write(1, {"policy/loss": 0.5})
        whole = path.read_bytes()
        with files_of_at_most(len(whole) + 10):  # a part of the next row fits
            for step in (2, 3, 4):
                sinks.write(step, {"policy/loss": 0.5})
                assert path.read_bytes() == whole
        assert sinks.failures == {}
        sinks.write(5, {"policy/loss": 0.5})
        assert steps(path) == [1, 2, 3, 4, 5]
        sinks.write(6, {"policy/loss": 0.5})
    assert steps(path) == [1, 2, 3, 4, 5, 6]
    told = [record.getMessage() for record in caplog.records]
    assert [line.partition("): ")[2][:35] for line in told[:2]] == [
        "1 rows of metrics wait in memory (o",
        "2 rows of metrics wait in memory (o",
    ]
    assert told[2].endswith("is written again: 3 rows that waited are in it")
    assert len(told) == 3


def test_rows_that_never_fit_are_counted_at_the_end(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(metrics_file, "MAX_WAITING_ROWS", 3)
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    with files_of_at_most(5):
        for step in range(5):
            sink.write(step, {"policy/loss": 0.5})
        assert len(sink._waiting) == 3
        sink.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    assert caplog.messages[-1].endswith("the last rows of metrics could not be written, 5 are lost")


def test_the_newest_rows_are_kept_where_too_many_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_file, "MAX_WAITING_ROWS", 3)
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    with files_of_at_most(5):
        for step in range(5):
            sink.write(step, {"policy/loss": 0.5})
    sink.close()
    assert steps(tmp_path / "metrics.jsonl") == [2, 3, 4]


def test_a_real_disk(small_disk, caplog):
    path = small_disk / "metrics.jsonl"
    with open_sinks(small_disk, QUIET, run_config={}) as sinks:
        sinks.write(0, {"policy/loss": 0.5})
        with full(small_disk):
            for step in range(1, 200):
                sinks.write(step, {"policy/loss": 0.5})
            read_metrics(path)  # whatever fitted into the last block is whole
        sinks.write(200, {"policy/loss": 0.5})
    assert steps(path) == list(range(201))
    assert "cannot be written (No space left on device): " in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's thread says it too
def test_tensorboard_there_is_switched_off(small_disk):
    with open_sinks(small_disk, LoggingConfig(tensorboard=True), run_config={}) as sinks:
        with full(small_disk):
            step = 0
            while not sinks.failures:  # its file has some room in its last block
                step += 1
                assert step < 1000
                sinks.write(step, {"policy/loss": 0.5})
            assert list(sinks.failures) == ["tensorboard"]
        sinks.write(step + 1, {"policy/loss": 0.5})
        for thread in threading.enumerate():
            if type(thread).__module__.startswith("tensorboard."):
                thread.join(5)
    assert steps(small_disk / "metrics.jsonl") == list(range(1, step + 2))


def test_a_run_that_could_say_nothing_may_have_met_a_full_disk(small_disk, capsys):
    folder = RunFolder(small_disk / "run")
    folder.open(tiny_cpu.gtpo(), resume=False)
    folder.close()
    with full(small_disk):
        assert status_command.run([str(folder.path)]) == 1
        assert "ended without a word (killed, or its disk was full: 0.0 MiB are free)" in capsys.readouterr().out


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), PermissionError(13, "Permission denied")])
def test_a_record_that_cannot_be_written_at_all_is_one_line_of_the_log(tmp_path, monkeypatch, caplog, error):
    def fails(*_):
        raise error

    run_state.record_start(tmp_path)
    monkeypatch.setattr(run_state, "_write", fails)
    with pytest.raises(ValueError, match="^the good message$"), run_state.recorded_end(tmp_path):
        raise ValueError("the good message")
    with run_state.recorded_end(tmp_path) as ending:  # and a run that ended well has ended well
        ending.outcome = run_state.FINISHED
    assert [record.getMessage() for record in caplog.records] == [
        f"how the run ended could not be written into {tmp_path}: {error.strerror}"
    ] * 2


def test_a_log_that_cannot_be_written_is_one_line_on_stderr(tmp_path, capsys):
    root = logging.getLogger()
    before = list(root.handlers)
    set_up_logs(run_folder=tmp_path)
    try:
        logger = logging.getLogger("gtpo_megatron.test")
        logger.info("the first line")
        with files_of_at_most((tmp_path / LOG_FILE).stat().st_size):
            for _ in range(3):
                logger.info("a line")
        logger.info("the last line")
    finally:
        for handler in [handler for handler in root.handlers if handler not in before]:
            root.removeHandler(handler)
            handler.close()
        logging.captureWarnings(capture=False)
    text = capsys.readouterr().err
    assert "Traceback" not in text
    assert text.count("cannot be written (File too large): lines are missing there") == 1
    assert "the last line" in (tmp_path / LOG_FILE).read_text()
