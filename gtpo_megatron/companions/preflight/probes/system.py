"""The machine around the GPUs: disk, network, the memory of Ray, software."""

import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import xxhash
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gtpo_megatron.machine_memory import memory
from gtpo_megatron.run_folder.provenance import commit, versions

BLOCK = 4 << 20


def file_of(folder: Path, name: str) -> Path:
    """The file that a process writes."""
    return folder / f"disk-{name.replace(' ', '-')}.bin"


def write_and_read(_instance: object, folder: str, name: str, num_bytes: int) -> dict[str, Any]:
    """Writes a file through to the disk and reads it again.

    Reading comes from the machine's cache where there is room for it, so its rate is an upper bound.

    Returns:
        ``write_s``, ``read_s``, ``wrote`` and ``read``: checksums of what was written and of what came back.
    """
    path = file_of(Path(folder), name)
    pattern = os.urandom(BLOCK)
    wrote, read = xxhash.xxh3_64(), xxhash.xxh3_64()
    began = time.perf_counter()
    with path.open("wb") as file:
        for number in range(num_bytes // BLOCK):
            piece = number.to_bytes(8, "big") + pattern[8:]
            wrote.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    write_s = time.perf_counter() - began
    began = time.perf_counter()
    with path.open("rb") as file:
        while piece := file.read(BLOCK):
            read.update(piece)
    return {
        "write_s": write_s,
        "read_s": time.perf_counter() - began,
        "wrote": wrote.hexdigest(),
        "read": read.hexdigest(),
    }


CHUNK = 1 << 20
TIMEOUT_S = 20.0
ADAPTERS = Path("/sys/class/infiniband")


def address_in_ray(_instance: object) -> str:
    """The address by which other nodes of the Ray reach this one."""
    import ray

    return str(ray.util.get_node_ip_address())


def listen(_instance: object, address: str, num_bytes: int) -> int:
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


def call(_instance: object, address: str, port: int, num_bytes: int) -> dict[str, Any]:
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


def adapters(_instance: object) -> dict[str, str]:
    """State and rate of every InfiniBand or RoCE port that NCCL may use, by ``device/port``; empty without any."""
    found = {}
    for port in sorted(ADAPTERS.glob("*/ports/*")):
        device = port.parent.parent.name
        if nccl_may_use(device, port.name, os.environ.get("NCCL_IB_HCA", "")):
            state, speed = ((port / name).read_text(encoding="ascii").strip() for name in ("state", "rate"))
            found[f"{device}/{port.name}"] = f"{state.partition(': ')[2]}, {speed}"
    return found


def nccl_may_use(device: str, port: str, setting: str) -> bool:
    """Whether NCCL_IB_HCA leaves a port to NCCL.

    Args:
        device: such as ``mlx5_0``.
        port: its number.
        setting: ``NAME`` or ``NAME:PORT`` with commas between them: beginnings of devices' names, or whole ones after
            ``=``; after ``^`` those to leave out. Empty: every port.
    """
    is_exclusion = setting.startswith("^")
    names = setting.removeprefix("^")
    is_exact = names.startswith("=")
    listed = [name.partition(":") for name in names.removeprefix("=").split(",") if name]
    is_listed = any(
        (device == name if is_exact else device.startswith(name)) and number in ("", port) for name, _, number in listed
    )
    return not listed or is_listed != is_exclusion


def cluster() -> dict[str, int]:
    """Nodes that are alive, their GPUs, and bytes of their object stores."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    resources = ray.cluster_resources()
    return {
        "nodes": len(alive),
        "gpus": int(resources.get("GPU", 0)),
        "store_bytes": int(resources.get("object_store_memory", 0)),
    }


def store(_instance: object, num_bytes: int) -> list[Any]:
    """Puts an array into the object store of a process's node; returns its reference in a list, which stays one."""
    import ray

    return [ray.put(np.arange(num_bytes // 8))]


def fetched(ask: Callable[[], list[Any]], num_bytes: int) -> tuple[float, bool]:
    """Seconds from the question to the array in this process, and whether it is the one that was stored."""
    import ray

    began = time.perf_counter()
    array = ray.get(ask()[0])
    seconds = time.perf_counter() - began
    return seconds, bool(np.array_equal(array, np.arange(num_bytes // 8)))


PACKAGE = "gtpo-megatron"
SMI_TIMEOUT_S = 20.0
SHARED_MEMORY = Path("/dev/shm")


def software(_instance: object) -> dict[str, str]:
    """Versions that every node must have alike."""
    found = {**versions(), "python": platform.python_version(), "commit": commit()}
    if driver := driver_version():
        found["nvidia driver"] = driver
    if torch.version.cuda is not None:
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, nccl))}
    return found


def driver_version() -> str:
    """Driver version of the first GPU; empty where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return ""
    answer = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=SMI_TIMEOUT_S,
        check=False,
    )
    return next(iter(answer.stdout.split()), "")


def machine(_instance: object) -> dict[str, Any]:
    """Cores, and bytes of memory and of shared memory that are free."""
    total, free = memory()
    shared = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    return {
        "cores": len(psutil.Process().cpu_affinity())
        if hasattr(psutil.Process, "cpu_affinity")
        else psutil.cpu_count(),
        "memory": total,
        "available": free,
        "shared": shared,
    }


def pins(extra: str) -> dict[str, Requirement]:
    """Distributions that this package with an extra asks for, by name; empty where it is not installed."""
    try:
        lines = importlib.metadata.requires(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    asked = [Requirement(line) for line in lines]
    return {
        canonicalize_name(one.name): one
        for one in asked
        if one.name != PACKAGE and (one.marker is None or one.marker.evaluate({"extra": extra}))
    }


def is_there(_instance: object) -> bool:
    """Whether a process can be asked at all."""
    return True
