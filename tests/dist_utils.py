"""Real gloo ranks for tests: processes that meet in a file store and hand their results back.

They are forks of a server that has imported what they need (``tests/conftest.py``) and done nothing else, so that a
rank is up in milliseconds. A fork of the test's own process would have whatever earlier tests have left there, without
its threads: three ranks died of a damaged heap, in whole gates, where a Ray client had been.
"""

import datetime
import faulthandler
import multiprocessing
import multiprocessing.connection
import pickle
import random
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist


def seed_all() -> None:
    """The generators of Python, numpy and torch, which tests draw from without a seed of their own."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the state that libraries draw from
    if torch.backends.cuda.is_built():
        torch.manual_seed(0)
    else:  # which would queue a call, with its stack, for every device that is not there
        torch.default_generator.manual_seed(0)


def _in_gloo_world(fn: Callable[..., Any], rank: int, world_size: int, init_method: str, *args: Any) -> Any:
    dist.init_process_group(
        "gloo",
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )
    return fn(rank, world_size, *args)


def _wait_for_the_others(folder: Path, world_size: int) -> None:
    """Until every rank has left its result, or the parent has seen one die.

    A rank that is done closes its sockets, and gloo on a slower one, which may still be forming the group, reports
    "Connection closed by peer": ranks leave together.
    """
    while not (folder / "leave").exists() and any(not (folder / f"rank{r}").exists() for r in range(world_size)):
        time.sleep(0.002)


class _Task:
    """What a rank does: functions inside tests, too, which plain pickle refuses."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.call = cloudpickle.dumps((fn, args))
        self.warnings = cloudpickle.dumps(warnings.filters)

    def __call__(self, *place: Any) -> Any:
        # until the process ends: what a rank has put there for the others, a group say, goes with them
        self.loaded = fn, args = pickle.loads(self.call)
        # as the test has them: what it does not expect is an error
        warnings.filters[:] = pickle.loads(self.warnings)  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]
        return fn(*place, *args)


def _rank_main(task: _Task, rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    seed_all()
    faulthandler.enable(Path(folder, f"rank{rank}.stacks").open("w"))  # noqa: SIM115 - open until the process ends
    try:
        outcome = ("ok", task(rank, world_size, f"file://{folder}/store"))
    except BaseException as error:  # noqa: BLE001 - carried to the parent, which raises
        outcome = ("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    Path(folder, f"rank{rank}.part").write_bytes(pickle.dumps(outcome))
    Path(folder, f"rank{rank}.part").rename(Path(folder, f"rank{rank}"))
    if outcome[0] == "ok":  # an error ends the collectives the others are in
        _wait_for_the_others(Path(folder), world_size)
        if dist.is_initialized():
            dist.destroy_process_group()


def start_process(fn: Callable[..., Any], *args: Any) -> multiprocessing.process.BaseProcess:
    """One process that runs ``fn(*args)``, for a test that looks at it, or kills it; ``fn`` sets its threads."""
    process = multiprocessing.get_context("forkserver").Process(target=_Task(fn, args))
    process.start()
    return process


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 90.0) -> list[Any]:
    """``fn(rank, world_size, *args)`` on every rank of a fresh gloo world; its results in rank order.

    Results travel by pickle: return tensors detached, on the CPU.

    Raises:
        AssertionError: a rank raised, died or outlived ``timeout_s``; the message carries its traceback.
    """
    return run_processes(partial(_in_gloo_world, fn), world_size, *args, timeout_s=timeout_s)


def run_processes(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 90.0) -> list[Any]:
    """``fn(rank, world_size, init_method, *args)`` on processes that have not met yet; results in rank order.

    What ``fn`` reads of the test arrives by pickle, as its results do: what the test has patched is as it was, and
    the environment is that of the first rank's start.

    Raises:
        AssertionError: a rank raised, died or outlived ``timeout_s``; the message carries its traceback.
    """
    context, task = multiprocessing.get_context("forkserver"), _Task(fn, args)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            # not daemonic: Megatron's checkpoint writer forks children of its own
            context.Process(target=_rank_main, args=(task, r, world_size, folder))
            for r in range(world_size)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and any(process.is_alive() for process in ranks):
            if any(p.exitcode is not None and not Path(folder, f"rank{r}").exists() for r, p in enumerate(ranks)):
                Path(folder, "leave").touch()
            multiprocessing.connection.wait([p.sentinel for p in ranks if p.is_alive()], timeout=0.5)
        hung = [r for r, process in enumerate(ranks) if process.is_alive()]
        for r in hung:
            ranks[r].kill()
        paths = [Path(folder, f"rank{r}") for r in range(world_size)]
        lost = [r for r, path in enumerate(paths) if not path.exists()]
        if lost:
            r = lost[0]
            told = Path(folder, f"rank{r}.stacks")
            stacks = told.read_text(encoding="utf-8", errors="replace") if told.exists() else "none, it never began"
            raise AssertionError(
                f"rank {r} left no result (exit code {ranks[r].exitcode}; hung ranks: {hung}); its stacks:\n{stacks}"
            )
        outcomes = [pickle.loads(path.read_bytes()) for path in paths]
        # the first to fail says why: its peers only that it has gone
        for r in sorted(range(world_size), key=lambda rank: paths[rank].stat().st_mtime_ns):
            if outcomes[r][0] == "error":
                raise AssertionError(f"rank {r} raised {outcomes[r][1]}")
        return [value for _, value in outcomes]
