"""What tests of several ranks stand on: ranks have nothing of the process that tests, and say how they ended."""

import os
import warnings

import psutil
import pytest
import torch.distributed as dist

from tests.dist_utils import run_processes, run_ranks

pytestmark = pytest.mark.distributed

left_here = []
"""Stands for what a library leaves in a process: a client, its threads' locks, a signal's handler."""


def whose_fork(*_):
    parent = psutil.Process().parent()
    return parent.pid, left_here, parent.num_threads()


def test_a_rank_is_no_fork_of_the_process_that_tests(monkeypatch):
    """There it would have what libraries left, without their threads; what it is a fork of has one."""
    monkeypatch.setattr(f"{__name__}.left_here", ["by an earlier test"])
    one, other = run_processes(whose_fork, 2)
    assert one == other
    parent, found, num_threads = one
    assert parent != os.getpid()
    assert (found, num_threads) == ([], 1)


def test_functions_inside_a_test_arrive_and_so_do_their_errors():
    word = "halves"

    def divided(rank, world_size):
        dist.barrier()
        return word, world_size / rank

    with pytest.raises(AssertionError, match=r"rank 0 raised ZeroDivisionError(.|\n)*in divided"):
        run_ranks(divided, 2)
    assert run_ranks(lambda rank, world_size: (word, rank + world_size), 2) == [("halves", 2), ("halves", 3)]


def test_a_warning_that_the_test_does_not_expect_is_an_error_in_its_ranks():
    def warned(*_):
        warnings.warn("too old", DeprecationWarning, stacklevel=1)
        return "went on"

    with pytest.raises(AssertionError, match="rank 0 raised DeprecationWarning: too old"):
        run_processes(warned, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run_processes(warned, 1) == ["went on"]


def test_a_rank_that_a_signal_ends_says_where_it_was():
    def aborted(rank, *_):
        if rank == 1:
            os.abort()

    told = r"rank 1 left no result \(exit code -6(.|\n)*Fatal Python error: Aborted(.|\n)*in aborted"
    with pytest.raises(AssertionError, match=told):
        run_processes(aborted, 2)
