"""A Ray of the test's own process, started as a run starts its own."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import psutil

from gtpo_megatron.config.cluster import ClusterConfig
from gtpo_megatron.orchestration.on_ray.collect import Deadline
from gtpo_megatron.orchestration.on_ray.local_cluster import start_own_ray

NUM_STARTS = 3
"""A raylet (2.60) ends itself if its agents are not up within 15 s; beside another test's engines they may not be."""


@contextmanager
def own_ray() -> Iterator[None]:
    """From its start to its end; what it sets in the environment is undone."""
    import ray

    # pytest's own folders have names too long for a socket
    with tempfile.TemporaryDirectory(prefix="gtpo-", ignore_cleanup_errors=True) as folder, mock.patch.dict(os.environ):
        start_ray(Path(folder))
        try:
            yield
        finally:
            ray.shutdown()


def start_ray(folder: Path) -> None:
    """Starts it, again if it does not come up.

    Raises:
        RuntimeError: it never did.
    """
    config, deadline = ClusterConfig(num_cpus=1, object_store_mib=80), Deadline(200.0)
    for left in reversed(range(NUM_STARTS)):
        own = folder / str(left)
        try:
            return start_own_ray(config, own, deadline=deadline, log_to_driver=False)
        except RuntimeError:
            _end_all_of(own)
            if not left or not deadline.left_s:
                raise
    return None


def _end_all_of(folder: Path) -> None:
    """Kills what a start has left: its processes are told its folder, agents of a dead raylet too."""
    family = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(f"{folder}/" in argument for argument in process.cmdline()):
                process.kill()
                family.append(process)
    psutil.wait_procs(family, timeout=30)
