"""A Ray of the test's own process, started as a run starts its own.

Ray itself gives its processes 30 s, which two busy cores do not always need less than.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from gtpo_megatron.config.cluster import ClusterConfig
from gtpo_megatron.orchestration.on_ray.collect import Deadline
from gtpo_megatron.orchestration.on_ray.local_cluster import start_own_ray


@contextmanager
def own_ray() -> Iterator[None]:
    """From its start to its end; what it sets in the environment is undone."""
    import ray

    # pytest's own folders have names too long for a socket
    with tempfile.TemporaryDirectory(prefix="gtpo-", ignore_cleanup_errors=True) as folder, mock.patch.dict(os.environ):
        config = ClusterConfig(num_cpus=1, object_store_mib=80)
        start_own_ray(config, Path(folder), deadline=Deadline(200.0), log_to_driver=False)
        try:
            yield
        finally:
            ray.shutdown()
