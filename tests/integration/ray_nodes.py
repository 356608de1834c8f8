"""A Ray of somebody else's on this machine, of one node or several: a raylet each, with addresses of their own."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
    started = [_start(folder / "head.log", "--head", f"--port={head.partition(':')[2]}", "--include-dashboard=false")]
    try:
        _wait_for(head, started[0], folder / "head.log")
        for number in range(1, num_nodes):
            address = f"--node-ip-address=127.0.0.{1 + number}"
            started.append(_start(folder / f"node{number}.log", f"--address={head}", address))
        yield head
        assert all(process.poll() is None for process in started), "a run has ended a Ray that was not its own"
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(30)


def _start(log: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *arguments]
    if "--head" in arguments:
        command += ["--node-ip-address=127.0.0.1", f"--temp-dir=/tmp/ray-test-{os.getpid()}"]
    command += ["--disable-usage-stats", "--num-cpus=2", f"--object-store-memory={128 << 20}"]
    command += ["--min-worker-port=0", "--max-worker-port=0"]
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out)


def _wait_for(head: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    host, _, port = head.partition(":")
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                break
        time.sleep(0.2)
    assert process.poll() is None, log.read_text()
