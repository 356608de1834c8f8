"""Who listens for connections, and what a stranger without a token gets there."""

import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http.client import HTTPException
from subprocess import Popen

import grpc
import psutil

LOOPBACK = frozenset({"127.0.0.1", "::1", "::ffff:127.0.0.1"})
EVERYWHERE = frozenset({"0.0.0.0", "::"})

KINDS = {
    "gcs_server": "GCS",
    "ray.util.client.server": "client server",
    "raylet/raylet": "raylet",
    "dashboard/dashboard.py": "dashboard",
    "DashboardAgent": "agent",
    "dashboard/agent.py": "agent",
    "RuntimeEnvAgent": "runtime environment agent",
    "runtime_env/agent/main.py": "runtime environment agent",
    "autoscaler/_private/monitor.py": "autoscaler",
    "ray::": "worker",
    "ray.scripts": "ray start",
    "gtpo": "driver",
}
"""What a process is, by a part of its command line; the first that fits."""

GRPC_METHODS = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "/ray.rpc.ReporterService/GetTraceback",
    "/ray.rpc.LogService/ListLogs",
    "/ray.rpc.RayletDriver/ClusterInfo",
)
"""One of every service that Ray's processes offer."""

HTTP_PATHS = ("/metrics", "/api/jobs/", "/get_or_create_runtime_env")


@dataclass(frozen=True, kw_only=True, order=True)
class Listener:
    """A port.

    Attributes:
        kind: of the process.
        ip: bound to.
        port: number.
    """

    kind: str
    ip: str
    port: int

    @property
    def is_reachable(self) -> bool:
        """From other machines."""
        return self.ip not in LOOPBACK


def listeners(processes: Iterable[psutil.Process]) -> set[Listener]:
    """Of these processes, now."""
    found = set()
    for process in processes:
        try:
            command = " ".join(process.cmdline())
            ports = [found.laddr for found in process.net_connections("tcp") if found.status == psutil.CONN_LISTEN]
        except psutil.Error:
            continue  # it has just ended
        kind = next((kind for part, kind in KINDS.items() if part in command), command[:60])
        found |= {Listener(kind=kind, ip=address.ip, port=address.port) for address in ports}
    return found


def family(root: Popen | psutil.Process) -> list[psutil.Process]:
    """A process and all below it."""
    try:
        top = psutil.Process(root.pid)
        return [top, *top.children(recursive=True)]
    except psutil.Error:
        return []


def seen_until_the_end(command: Popen, look: Callable[[list[psutil.Process]], None]) -> set[Listener]:
    """Every listener of a command and of what it starts, as long as it runs."""
    seen = set[Listener]()
    while command.poll() is None:
        processes = family(command)
        seen |= listeners(processes)
        look(processes)
        time.sleep(0.3)
    return seen


def answer_without_token(host: str, port: int) -> str:
    """``refused`` where no service does anything for a stranger, else what one has done."""
    codes = {method: _grpc(host, port, method) for method in GRPC_METHODS}
    if "UNAUTHENTICATED" in codes.values():
        done = [
            f"{method}: {code}" for method, code in codes.items() if code not in ("UNAUTHENTICATED", "UNIMPLEMENTED")
        ]
        return "; ".join(done) or "refused"
    if "UNIMPLEMENTED" in codes.values():
        return f"gRPC: {codes}"
    statuses = {path: _http(host, port, path) for path in HTTP_PATHS}
    if set(statuses.values()) <= {401, 403, 404, 0} and {401, 403} & set(statuses.values()):
        return "refused"
    return f"{codes}; {statuses}"


def _grpc(host: str, port: int, method: str) -> str:
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        try:
            channel.unary_unary(method)(b"", timeout=10)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"


def _http(host: str, port: int, path: str) -> int:
    """Status; 0 where it is no HTTP."""
    try:
        with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, HTTPException):
        return 0
