"""Whether processes of two nodes reach each other, how fast, and over which interface."""

import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil

CHUNK = 1 << 20
TIMEOUT_S = 20.0
ADAPTERS = Path("/sys/class/infiniband")


def address_in_ray(_held: object) -> str:
    """The address by which other nodes of the Ray reach this one."""
    import ray

    return str(ray.util.get_node_ip_address())


def listen(_held: object, address: str, num_bytes: int) -> int:
    """Opens a port on an address, which takes that many bytes from each of its callers, and answers how many came.

    The thread ends with its process, or ``TIMEOUT_S`` after its last caller.
    """
    server = socket.create_server((address, 0))
    server.settimeout(TIMEOUT_S)
    threading.Thread(target=_serve, args=(server, num_bytes), name="preflight network", daemon=True).start()
    return int(server.getsockname()[1])


def _serve(server: socket.socket, num_bytes: int) -> None:
    with server:
        while True:
            try:
                caller, _ = server.accept()
            except TimeoutError:
                return
            with caller:
                caller.settimeout(TIMEOUT_S)
                caller.sendall(caller.recv(1))  # there and back
                left = num_bytes
                while left and (taken := len(caller.recv(min(left, CHUNK)))):
                    left -= taken
                caller.sendall((num_bytes - left).to_bytes(8, "big"))


def call(_held: object, address: str, port: int, num_bytes: int) -> dict[str, Any]:
    """Calls an opened port.

    Returns:
        Seconds ``there_and_back`` of one byte, ``seconds`` of all, bytes that ``arrived``, and this side's
        ``interface`` with its nominal ``megabits`` a second (0: unknown).
    """
    with socket.create_connection((address, port), timeout=TIMEOUT_S) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began = time.perf_counter()
        line.sendall(b"1")
        line.recv(1)
        there_and_back = time.perf_counter() - began
        payload = bytes(CHUNK)
        began = time.perf_counter()
        for start in range(0, num_bytes, CHUNK):
            line.sendall(payload[: min(CHUNK, num_bytes - start)])
        arrived = int.from_bytes(line.recv(8), "big")
        seconds = time.perf_counter() - began
        name = _interface(line.getsockname()[0])
    stats = psutil.net_if_stats().get(name)
    return {
        "there_and_back": there_and_back,
        "seconds": seconds,
        "arrived": arrived,
        "interface": name,
        "megabits": stats.speed if stats else 0,
    }


def _interface(address: str) -> str:
    """Name of the interface with an address; empty if none has it."""
    for name, found in psutil.net_if_addrs().items():
        if any(one.address == address for one in found):
            return name
    return ""


def adapters(_held: object) -> dict[str, str]:
    """State and rate of every InfiniBand or RoCE port by ``device/port``; empty where there is none."""
    found = {}
    for port in sorted(ADAPTERS.glob("*/ports/*")):
        state, speed = ((port / name).read_text(encoding="ascii").strip() for name in ("state", "rate"))
        found[f"{port.parent.parent.name}/{port.name}"] = f"{state.partition(': ')[2]}, {speed}"
    return found
