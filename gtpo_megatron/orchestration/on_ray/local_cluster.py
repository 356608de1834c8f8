"""A Ray of the run's own: on the loopback alone, behind a token of its own, in a folder that nobody else can open.

By itself Ray listens on every network of the machine, keeps its token readable in the home folder, and its sockets and
logs where everybody may write: it opens the folder that it is given to all (mode 777), so it is given one inside of a
private one.
"""

import os
import secrets
from pathlib import Path
from typing import Any

import torch

from gtpo_megatron.config.cluster import ClusterConfig
from gtpo_megatron.distributed.rendezvous import ONE_MACHINE

LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray stays on the loopback where it does not make clusters. It has no other way, whatever address it is given."""

METRICS_SWITCH = "RAY_enable_metrics_collection"
"""Nobody reads Ray's own counters."""


def start_own_ray(config: ClusterConfig, temp_folder: Path, **options: Any) -> None:
    """Starts it and connects this process; the processes of the run inherit what is set in the environment.

    Args:
        config: how large.
        temp_folder: private, for its sockets and logs.
        options: further ones of ``ray.init``.
    """
    token = secrets.token_hex(32)
    os.environ |= {LOOPBACK_SWITCH: "0", METRICS_SWITCH: "0", "RAY_AUTH_TOKEN": token, **ONE_MACHINE}
    os.environ.pop("RAY_AUTH_MODE", None)  # Ray then turns its token on
    import ray
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # compiled

    # for a process that had Ray imported, or used, before
    ray_constants.ENABLE_RAY_CLUSTER = False
    AuthenticationTokenLoader.instance().reset_cache()
    ray.init(
        address="local",  # neither RAY_ADDRESS nor a head that someone else started on this machine
        num_cpus=config.num_cpus,
        # Ray counts devices, whatever torch is installed
        num_gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        object_store_memory=config.object_store_mib << 20,
        include_dashboard=False,
        _temp_dir=str(temp_folder / "ray"),
        **options,
    )
