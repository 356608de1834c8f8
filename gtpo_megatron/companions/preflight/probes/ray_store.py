"""Ray's nodes and its object store."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np


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


def store(_held: object, num_bytes: int) -> list[Any]:
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
