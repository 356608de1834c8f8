"""Servers that make a run's workers, on a machine without GPUs: each has imported what they need, and is forked.

A run starts them before it reads its inputs and starts Ray, so that the imports of vLLM and Megatron, most of a start,
are made meanwhile, and once for all ranks. ``worker_setup.py``, which the raylet runs for every worker, asks the server
that the worker's environment names. A server knows nothing of the run; it ends with the driver.

What libraries read from the environment when they are loaded a fork cannot change: a server is for workers of exactly
its own variables, whose bits are then those of a worker that has imported for itself.
"""

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.cycle_collector import without_collections
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.orchestration.on_ray.environment import engine_variables, rank_variables
from gtpo_megatron.orchestration.on_ray.placement import ClusterNode, place_run
from gtpo_megatron.orchestration.run_supervisor import LONGEST_BASE
from gtpo_megatron.supervision.worker import PR_SET_PDEATHSIG

TRAINER_MODULES = (
    "gtpo_megatron.actor.actor",
    "torch._dynamo",  # which torch's optimizers import
    "transformers.models.auto.tokenization_auto",
    "gtpo_megatron.orchestration.stages.grading",
)
"""Of ranks and the reward process."""

ENGINE_MODULES = (
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "gtpo_megatron.rollout.vllm_worker",
    "gtpo_megatron.rollout.vllm_engine",
)

REAP_S = 1.0
"""How long a worker that has ended stays, about, so that whoever observes it can read how."""

_OF_DRIVER = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that a server leaves to its driver."""

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from gtpo_megatron.orchestration.on_ray.worker_servers import main; main()"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Server:
    """A process that makes workers of these variables, and its socket."""

    variables: Mapping[str, str]
    address: Path
    process: "subprocess.Popen[bytes]"


class WorkerServers:
    """The servers of a run; none on a machine with GPUs, or with a Ray that was started before.

    Args:
        folder: private folder of their sockets.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers: list[_Server] = []

    def start(self, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        """Starts a server, which imports ``modules``."""
        address = self._folder / f"{len(self._servers)}.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen()
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), str(os.getpid()), str(address), *modules],
                stdin=listener.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | variables,
                process_group=0,  # as Ray's processes
            )
        self._servers.append(_Server(variables=dict(variables), address=address, process=process))

    @property
    def are_there(self) -> bool:
        """Whether there is one."""
        return bool(self._servers)

    def address_for(self, variables: Mapping[str, str]) -> str:
        """The socket of a server for workers of these variables; empty if there is none."""
        return next((str(server.address) for server in self._servers if server.variables == variables), "")

    def end(self) -> None:
        """Ends the servers, not the workers."""
        for server in self._servers:
            server.process.kill()
            server.process.wait()


@contextmanager
def worker_servers(config: RunConfig) -> Iterator[WorkerServers]:
    """The servers of a run, which end with the block; they are started at once and import meanwhile."""
    base = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="gtpo-", dir=base if len(base) <= LONGEST_BASE else "/tmp"))
    servers = WorkerServers(folder)
    try:
        if config.cluster.mode == "ray" and not config.cluster.address and not _may_have_gpus():
            node = ClusterNode(node_id="", host="", num_gpus=0, num_cpus=config.cluster.num_cpus)
            if config.rollout.ranks_per_engine == 1:  # vLLM starts the workers of others itself, which import then
                with contextlib.suppress(ConfigError):  # the run will say what does not fit
                    servers.start(ENGINE_MODULES, engine_variables(config, place_run(config, [node]), 0))
            servers.start(TRAINER_MODULES, rank_variables(config, has_gpus=False))
        yield servers
    finally:
        servers.end()
        shutil.rmtree(folder, ignore_errors=True)


def _may_have_gpus() -> bool:
    """Whether the installed torch is a build for GPUs; torch itself is not imported."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return True
    return runpy.run_path(str(Path(found.origin).with_name("version.py")))["cuda"] is not None


def main() -> NoReturn:
    """Entry point of a server; ends as a worker that it has made, or with its driver."""
    driver, address, modules = int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]
    listener = socket.socket(fileno=sys.stdin.fileno())
    for number in _OF_DRIVER:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: _end_with_driver(address))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != driver:  # which has ended before the line above
        _end_with_driver(address)
    with _without_ray(), without_collections():
        for module in modules:
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a worker would touch all that it shares with its server
    worker = _serve(listener)
    listener.detach()  # its descriptor becomes the worker's input
    _become(*worker)


def _end_with_driver(address: Path) -> NoReturn:
    """Ends a server whose driver could not end it, and removes the sockets."""
    shutil.rmtree(address.parent, ignore_errors=True)
    os._exit(0)


@contextmanager
def _without_ray() -> Iterator[None]:
    """Ray's library reads the environment when it is loaded, of which each worker has its own.

    vLLM takes Ray along if it is there, for engines that start Ray themselves.
    """
    sys.modules["ray"] = None  # type: ignore[assignment]  # so `import` says that there is none
    try:
        yield
    finally:
        del sys.modules["ray"]


def _serve(listener: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Makes workers; returns in each, with what was asked for and its streams."""
    ended: set[int] = set()
    listener.settimeout(REAP_S)
    while True:
        ended = _reap(ended)
        with contextlib.suppress(OSError):  # nobody asks, or who has asked is gone
            connection, _ = listener.accept()
            with connection:
                request, streams = _request(connection)
                if os.fork() == 0:
                    return request, streams
                for descriptor in streams:
                    os.close(descriptor)
                connection.sendall(b"made")


def _request(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """What ``worker_setup.py`` asks for, and its input, output and errors."""
    _, streams, *_ = socket.recv_fds(connection, 1, 3)
    return json.loads(b"".join(iter(lambda: connection.recv(1 << 16), b""))), streams


def _reap(ended: set[int]) -> set[int]:
    """Lets go of workers that had ended at the last look; returns those that have ended since."""
    for pid in ended:
        os.waitpid(pid, 0)
    with contextlib.suppress(ChildProcessError):
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return {found.si_pid} if found is not None else set()
    return set()


def _become(request: Mapping[str, Any], streams: Sequence[int]) -> NoReturn:
    """Goes on as the worker that was asked for, as if this process had just been started for it."""
    os.setpgrp()  # as the raylet does, which ends a worker's group with it
    for number in (*_OF_DRIVER, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["variables"])
    os.chdir(request["folder"])
    tempfile.tempdir = None
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(request["oom_score"], encoding="ascii")
    sys.argv[:] = request["arguments"]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()
