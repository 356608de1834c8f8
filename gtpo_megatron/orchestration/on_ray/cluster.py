"""Connects to a Ray cluster: a private one on this machine, or one that was started before."""

import atexit
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gtpo_megatron.config.cluster import ClusterConfig
from gtpo_megatron.errors import WorkerError
from gtpo_megatron.orchestration.on_ray.collect import Deadline
from gtpo_megatron.orchestration.on_ray.local_cluster import start_own_ray
from gtpo_megatron.orchestration.on_ray.placement import ClusterNode, in_order
from gtpo_megatron.orchestration.on_ray.worker_servers import WorkerServers

logger = logging.getLogger(__name__)

HEAD_TIMEOUT_S = 5.0
"""Timeout of a connection to the head; Ray's own is a minute."""

TOKEN_HINT = "; if it listens, it may want a token: set RAY_AUTH_MODE=token, as `ray start` does for itself"
"""`ray start` requires a token if ~/.ray has one, but a driver does not send it by default."""

COMMON_OPTIONS: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}


def join_cluster(
    config: ClusterConfig,
    *,
    deadline: Deadline,
    temp_folder: Path,
    servers: WorkerServers | None = None,
    joined: Callable[[int], None] | None = None,
) -> None:
    """Connects this process to Ray, starting one if no address is given.

    Args:
        config: address and size of the cluster.
        deadline: limit of the whole start of the run.
        temp_folder: private folder for sockets and logs of a Ray that is started here.
        servers: may make the workers of a Ray that is started here; None: each is started by Ray.
        joined: called with the number of nodes that have joined, while others are waited for.

    Raises:
        WorkerError: the head does not answer, or too few nodes have joined it by then.
    """
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # cluster nodes often have no internet access
    where = f"at cluster.address={config.address!r}" if config.address else "of this run"
    try:
        with _keeping_sigterm():
            if config.address:
                _knock(config.address)
                ray.init(address=config.address, **COMMON_OPTIONS)
            else:
                asks = servers is not None and servers.are_there
                start_own_ray(config, temp_folder, deadline=deadline, asks_servers=asks, **COMMON_OPTIONS)
    except (OSError, ValueError, RuntimeError) as error:
        hint = (
            TOKEN_HINT if isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError) else ""
        )
        raise WorkerError(f"the Ray head {where} does not answer: {error}{hint}") from error
    try:
        _wait_for_nodes(config, deadline, joined)
    except WorkerError:
        ray.shutdown()
        raise


@contextmanager
def _keeping_sigterm() -> Iterator[None]:
    """After the block SIGTERM is this process's again.

    Ray (2.60) replaces the handler by one that exits at once, and its library puts another one in front, which prints a
    trace of the stack and aborts at the second signal.
    """
    from ray._private import utils

    replace = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda _: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = replace
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))  # which the library has not told Python of


def leave_lost_ray() -> None:
    """Lets go of a Ray whose own processes are dead; this process will then end with status 1.

    ``ray.shutdown`` would wait for the dead. Without it an exit handler of Ray's library (2.60) destroys the client
    while one of its threads goes on recording metrics of it: the process would die of SIGSEGV or of a damaged heap.
    """
    import ray

    atexit.unregister(ray.shutdown)
    atexit.register(_end_before_c_handlers)


def _end_before_c_handlers() -> None:
    """Runs Python's other exit handlers, and ends the process without those of C libraries.

    Handlers that were registered after this one have run, and run once more: Python has no way to leave them out.
    """
    atexit.unregister(_end_before_c_handlers)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader has left, or it is closed
            stream.flush()
    os._exit(1)


def ray_nodes() -> list[ClusterNode]:
    """The nodes that are alive, this process's own first."""
    import ray

    nodes = [
        ClusterNode(
            node_id=node["NodeID"],
            host=node["NodeManagerHostname"],
            num_gpus=int(node["Resources"].get("GPU", 0)),
            num_cpus=int(node["Resources"].get("CPU", 0)),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return in_order(nodes, first=ray.get_runtime_context().get_node_id())


def _knock(address: str) -> None:
    """Raises OSError if nothing listens at the address."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():  # not "auto"
        socket.create_connection((host, int(port)), timeout=HEAD_TIMEOUT_S).close()


def _wait_for_nodes(config: ClusterConfig, deadline: Deadline, joined: Callable[[int], None] | None) -> None:
    while (num := len(ray_nodes())) < config.num_nodes:
        if joined is not None:
            joined(num)
        if not deadline.left_s:
            raise WorkerError(
                f"{num} of cluster.num_nodes={config.num_nodes} nodes have joined the Ray head at {config.address} "
                f"within {deadline.limit_s:.0f} s; see the logs of the nodes that are missing"
            )
        time.sleep(0.2)
    if num > 1:
        logger.info("%d nodes have joined the Ray head at %s", num, config.address)
