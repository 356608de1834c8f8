"""Real gloo ranks for tests: forked processes that meet in a file store and hand their results back.

Fork, not spawn: the parent has imported torch already and no CUDA context exists, so a rank is up in milliseconds.
"""

import datetime
import faulthandler
import multiprocessing
import multiprocessing.connection
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


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


def _rank_main(fn: Callable[..., Any], rank: int, world_size: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    # pytest's handler writes where nobody looks for it
    faulthandler.enable(Path(folder, f"rank{rank}.stacks").open("w"))  # noqa: SIM115 - open until the process ends
    try:
        outcome = ("ok", fn(rank, world_size, f"file://{folder}/store", *args))
    except BaseException as error:  # noqa: BLE001 - carried to the parent, which raises
        outcome = ("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    Path(folder, f"rank{rank}.part").write_bytes(pickle.dumps(outcome))
    Path(folder, f"rank{rank}.part").rename(Path(folder, f"rank{rank}"))
    if outcome[0] == "ok":  # an error ends the collectives the others are in
        _wait_for_the_others(Path(folder), world_size)
        if dist.is_initialized():
            dist.destroy_process_group()


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 90.0) -> list[Any]:
    """``fn(rank, world_size, *args)`` on every rank of a fresh gloo world; its results in rank order.

    Results travel by pickle: return tensors detached, on the CPU.

    Raises:
        AssertionError: a rank raised, died or outlived ``timeout_s``; the message carries its traceback.
    """
    return run_processes(partial(_in_gloo_world, fn), world_size, *args, timeout_s=timeout_s)


def run_processes(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 90.0) -> list[Any]:
    """``fn(rank, world_size, init_method, *args)`` on forked processes that have not met yet; results in rank order.

    Raises:
        AssertionError: a rank raised, died or outlived ``timeout_s``; the message carries its traceback.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            # not daemonic: Megatron's checkpoint writer forks children of its own
            context.Process(target=_rank_main, args=(fn, r, world_size, folder, args))
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
            stacks = Path(folder, f"rank{r}.stacks").read_text(encoding="utf-8", errors="replace")
            raise AssertionError(
                f"rank {r} left no result (exit code {ranks[r].exitcode}; hung ranks: {hung}); its stacks:\n{stacks}"
            )
        outcomes = [pickle.loads(path.read_bytes()) for path in paths]
        # the first to fail says why: its peers only that it has gone
        for r in sorted(range(world_size), key=lambda rank: paths[rank].stat().st_mtime_ns):
            if outcomes[r][0] == "error":
                raise AssertionError(f"rank {r} raised {outcomes[r][1]}")
        return [value for _, value in outcomes]
