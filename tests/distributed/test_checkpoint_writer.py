"""The forked writer of a rank: what it tells, and how it ends. Processes are killed; Megatron's writing is made up."""

import functools
import gc
import os
import signal
import time
import weakref
from types import SimpleNamespace

import psutil
import pytest

from tests.dist_utils import run_processes, start_process

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(120)]

MANY_PLACES = list(range(200_000))
"""More than a pipe holds: a writer that nobody listens to would wait for ever."""


def write(writing):
    """Starts a write of one file; ``writing`` stands for Megatron's function and returns where things lie."""
    from gtpo_megatron.actor.checkpoint import writer as checkpoint_writer

    def write_preloaded_data(transforms, number, bucket, outcomes, under_way, use_fsync):
        assert (transforms, bucket, use_fsync) == (["transform"], "bucket", True)
        try:
            outcome = writing()
        except OSError as error:  # as Megatron does
            outcome = error
        outcomes.put((number, outcome))
        under_way.get()
        under_way.task_done()

    checkpoint_writer.FileSystemWriterAsync = SimpleNamespace(write_preloaded_data=write_preloaded_data)
    request = SimpleNamespace(
        async_fn=functools.partial(print, ["transform"], False),
        async_fn_args=[0, ["bucket"], None],
        preload_fn=None,
        finalize_fns=(),
    )
    return functools.partial(checkpoint_writer.ForkedWrite, request, in_background=False)


def until(condition, within_s=60.0):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def tell_pid_and(path, go_on):
    """What a writer does: it says who it is, and then this."""
    path.with_suffix(".partial").write_text(str(os.getpid()))
    path.with_suffix(".partial").rename(path)
    return go_on()


def hang():
    while True:
        time.sleep(1)


@pytest.mark.slow
def test_what_was_written_comes_whole_with_checksums(tmp_path):
    def whole():
        (tmp_path / "__0_0.distcp").write_bytes(b"weights")
        (tmp_path / "__1_0.distcp").write_bytes(b"another rank's")
        return MANY_PLACES

    def rank(*_):
        from gtpo_megatron.actor.checkpoint.writer import results_queue

        checksums, error = write(whole)(tmp_path).wait()
        return list(checksums), error, results_queue().get_nowait() == {0: MANY_PLACES}

    assert run_processes(rank, 1) == [(["__0_0.distcp"], "", True)]


@pytest.mark.parametrize(
    ("fails", "told"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "its writer died (exit code -9)"),
        (lambda: (_ for _ in ()).throw(OSError(28, "No space left on device")), "OSError: [Errno 28] No space left"),
    ],
    ids=["killed", "disk full"],
)
def test_a_write_that_fails_is_told(tmp_path, fails, told):
    """By the process that wrote: none of its own is left that somebody could wait for."""

    [(checksums, error)] = run_processes(lambda *_: write(fails)(tmp_path).wait(), 1)
    assert (checksums, told in error) == ({}, True), error


@pytest.mark.slow
@pytest.mark.parametrize("go_on", [hang, lambda: MANY_PLACES], ids=["in mid-write", "with results for nobody"])
def test_a_writer_ends_with_a_rank_that_is_killed(tmp_path, go_on):
    told = tmp_path / "pid"

    def rank():
        from gtpo_megatron.actor.checkpoint import writer as checkpoint_writer

        if go_on is not hang:  # the pipe alone has to tell it
            checkpoint_writer._end_with = lambda _: None
        write(lambda: tell_pid_and(told, go_on))(tmp_path)
        hang()

    process = start_process(rank)
    until(told.exists)
    writer = int(told.read_text())
    process.kill()
    process.join()
    until(lambda: is_gone(writer), within_s=20)


@pytest.mark.slow
@pytest.mark.parametrize("go_on", [hang, lambda: MANY_PLACES], ids=["in mid-write", "with results for nobody"])
def test_a_write_that_is_abandoned_does_not_keep_its_rank(tmp_path, go_on):
    """The end of a process waits for its children, and this one would wait for a listener."""
    told = tmp_path / "pid"

    def rank():
        started = write(lambda: tell_pid_and(told, go_on))(tmp_path)
        until(told.exists)
        started.abandon()

    process = start_process(rank)
    process.join(60)
    assert process.exitcode == 0
    assert is_gone(int(told.read_text()))


def test_what_was_copied_for_a_write_stays_until_it_is_written(tmp_path):
    """A copy of a GPU's tensor is in memory that the fork shares, and that torch gives to the next copy."""
    go_on = tmp_path / "go on"

    class Copy(str):
        """Equals "bucket", and can be referred to weakly."""

    def rank(*_):
        copies = [Copy("bucket")]
        kept = weakref.ref(copies[0])
        started = write(lambda: until(go_on.exists))
        started.args[0].preload_fn = lambda: [copies.pop()]
        under_way = started(tmp_path)
        gc.collect()
        was_kept = kept() is not None
        go_on.touch()
        _, error = under_way.wait()
        return was_kept, error, kept() is None

    assert run_processes(rank, 1) == [(True, "", True)]
