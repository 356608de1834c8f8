"""A Ray of somebody else's on this machine, of one node or several: a raylet each, with addresses of their own."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NUM_STARTS = 3
"""As in ``own_ray``: Ray gives up a node that is not up in time, beside another test's engines too early."""


@contextmanager
def ray_of_nodes(folder: Path, num_nodes: int) -> Iterator[str]:
    """The address of its head, which asks for the token of the environment; fails if a run has ended it.

    Args:
        folder: of the logs.
        num_nodes: nodes, of two cores each.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        head = f"127.0.0.1:{probe.getsockname()[1]}"
    own = f"--temp-dir=/tmp/ray-test-{os.getpid()}"
    started = [_started(folder / "head.log", "--head", f"--port={head.partition(':')[2]}", own, number=0)]
    try:
        started.extend(
            _started(folder / f"node{number}.log", f"--address={head}", number=number) for number in range(1, num_nodes)
        )
        yield head
        assert all(process.poll() is None for process in started), "a run has ended a Ray that was not its own"
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(60)


def _started(log: Path, *arguments: str, number: int) -> "subprocess.Popen[bytes]":
    """A node that is up, tried again if Ray gives it up."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *arguments]
    command += [f"--node-ip-address=127.0.0.{1 + number}", "--disable-usage-stats", "--num-cpus=2"]
    command += [f"--object-store-memory={128 << 20}", "--min-worker-port=0", "--max-worker-port=0"]
    command += ["--include-dashboard=false"] if number == 0 else []
    for _ in range(NUM_STARTS):
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out)
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline and process.poll() is None:
            if "block forever" in log.read_text():
                return process
            time.sleep(0.2)
        process.kill()
    raise AssertionError(log.read_text())
