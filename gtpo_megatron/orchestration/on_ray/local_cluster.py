"""Starts a private Ray: on the loopback interface, with its own token, in a private folder.

By default Ray listens on every interface, keeps its token readable in the home folder, and sets mode 777 on its
temporary folder, which is therefore created inside a private one.
"""

import os
import secrets
from pathlib import Path
from typing import Any

import torch

from gtpo_megatron.config.cluster import ClusterConfig
from gtpo_megatron.distributed.rendezvous import ONE_MACHINE

LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""If it is off, Ray listens on the loopback interface; it has no other setting for this."""

METRICS_SWITCH = "RAY_enable_metrics_collection"
"""Ray's own counters are not used."""


def start_own_ray(config: ClusterConfig, temp_folder: Path, **options: Any) -> None:
    """Starts Ray and connects this process; sets environment variables that the run's processes inherit.

    Args:
        config: size of the cluster.
        temp_folder: private folder for sockets and logs.
        options: further options of ``ray.init``.

    Raises:
        RuntimeError: Ray says in an exception without a class of its own that it did not start; mostly that its
            processes were not up within the 30 s that it (2.60) has for them, which cannot be changed.
    """
    token = secrets.token_hex(32)
    os.environ |= {LOOPBACK_SWITCH: "0", METRICS_SWITCH: "0", "RAY_AUTH_TOKEN": token, **ONE_MACHINE}
    os.environ.pop("RAY_AUTH_MODE", None)  # Ray then turns its token on
    import ray
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # compiled

    # in case this process has imported or used Ray before
    ray_constants.ENABLE_RAY_CLUSTER = False
    AuthenticationTokenLoader.instance().reset_cache()
    try:
        ray.init(
            address="local",  # neither RAY_ADDRESS nor a head that someone else started on this machine
            num_cpus=config.num_cpus,
            # Ray counts devices even if torch is a CPU build
            num_gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
            object_store_memory=config.object_store_mib << 20,
            include_dashboard=False,
            _temp_dir=str(temp_folder / "ray"),
            **options,
        )
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise RuntimeError(
            f"it did not start ({error}); this machine has {os.cpu_count()} cores and a load of "
            f"{os.getloadavg()[0]:.0f}: if that is too busy, start the run again later"
        ) from error
