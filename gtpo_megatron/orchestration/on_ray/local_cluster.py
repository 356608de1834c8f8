"""Starts a private Ray: on the loopback interface, with its own token, in a private folder.

By default Ray listens on every interface, keeps its token readable in the home folder, and sets mode 777 on its
temporary folder, which is therefore created inside a private one.
"""

import math
import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from gtpo_megatron.config.cluster import ClusterConfig
from gtpo_megatron.distributed.rendezvous import ONE_MACHINE
from gtpo_megatron.orchestration.on_ray import dashboard_agent, worker_setup
from gtpo_megatron.orchestration.on_ray.collect import Deadline

LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""If it is off, Ray listens on the loopback interface; it has no other setting for this."""

NICENESS = "RAY_worker_niceness"
"""Ray starts ranks and engines at 15, so that any other process of the session takes the processors from them."""

METRICS_SWITCH = "RAY_enable_metrics_collection"
"""Ray's own counters are not used."""

IDLE_WORKERS_SWITCH = "RAY_prestart_worker_first_driver"
"""Workers that Ray starts ahead, one a core, have no environment variables of ours and would serve nobody."""

REGISTER_TIMEOUT = "RAY_worker_register_timeout_seconds"
"""Of a worker, after which Ray (2.60) starts another one: 60 s, in which a server may not have imported all."""

POLL_S = 0.1
"""Before the next question to a GCS that has not waited."""


class _NotUpError(Exception):
    """The raylet has ended, or the deadline has passed."""


def start_own_ray(
    config: ClusterConfig, temp_folder: Path, *, deadline: Deadline, asks_servers: bool = False, **options: Any
) -> None:
    """Starts Ray and connects this process; sets environment variables that the run's processes inherit.

    Each of Ray's processes, and with the raylet all of the run's, is in a process group of its own: a signal to the
    group of this one (Ctrl-C, ``timeout``, a terminal that closes) is for this one, which ends the others in order.

    Args:
        config: size of the cluster.
        temp_folder: private folder for sockets and logs.
        deadline: limit for the raylet to be up; its GCS has Ray's own 30 s.
        asks_servers: workers whose environment names a server are made by it (``worker_setup.py``).
        options: further options of ``ray.init``.

    Raises:
        RuntimeError: the raylet was not up by then or has ended, its GCS does not answer, or Ray says something else in
            an exception without a class of its own.
    """
    token = secrets.token_hex(32)
    switches = dict.fromkeys((LOOPBACK_SWITCH, METRICS_SWITCH, NICENESS, IDLE_WORKERS_SWITCH), "0")
    os.environ[REGISTER_TIMEOUT] = str(math.ceil(deadline.limit_s))
    os.environ |= {**switches, "RAY_AUTH_TOKEN": token, **ONE_MACHINE}
    os.environ.pop("RAY_AUTH_MODE", None)  # Ray then turns its token on
    import ray
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # compiled

    # in case this process has imported or used Ray before
    ray_constants.ENABLE_RAY_CLUSTER = False
    AuthenticationTokenLoader.instance().reset_cache()
    try:
        with _waiting_for_its_raylet(deadline), _in_groups_of_their_own(), _with_own_parts(asks_servers=asks_servers):
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
        if type(error) not in (Exception, _NotUpError):
            raise
        raise RuntimeError(
            f"it did not start ({error}); this machine has {os.cpu_count()} cores and a load of "
            f"{os.getloadavg()[0]:.0f}: if that is too busy, start the run again later"
        ) from error


@contextmanager
def _waiting_for_its_raylet(deadline: Deadline) -> Iterator[None]:
    """Has Ray wait until the deadline for its raylet, and no longer for one that has ended.

    Ray (2.60) asks its GCS for the node once, which waits for 30 s, and gives up. The deadline is looked at between two
    questions. A raylet ends itself if its agents, which import for long on a busy machine, are not up within 15 s.
    """
    from ray._private import services
    from ray.exceptions import RaySystemError

    ask = services.get_node

    def wait_for_node(gcs_address: str, node_id: str) -> Any:
        while True:
            try:
                return ask(gcs_address, node_id)
            except (RuntimeError, RaySystemError) as error:  # the latter if the GCS does not answer
                if not _has_raylet():
                    raise _NotUpError("its raylet has ended") from error
                if not deadline.left_s:
                    raise _NotUpError(f"its raylet is not up within {deadline.limit_s:g} s") from error
            time.sleep(POLL_S)

    services.get_node = wait_for_node
    try:
        yield
    finally:
        services.get_node = ask


@contextmanager
def _in_groups_of_their_own() -> Iterator[None]:
    """Ray (2.60) starts its processes in the group of this one and has no setting for it.

    A session of their own would be too much: Linux shares the processors among sessions first (autogroups), and an
    engine that polls its workers from another session takes theirs away, 0.3 s of sampling becoming 30.
    """
    from ray._private import services

    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = popen


@contextmanager
def _with_own_parts(*, asks_servers: bool) -> Iterator[None]:
    """Ray (2.60) starts no dashboard, autoscaler and log monitor, which nobody asks, and two scripts of ours.

    Those are the raylet's dashboard agent and, with servers, the one that starts workers. ``include_dashboard=False``
    starts a dashboard without pages, and ``ray.init`` waits for it; of the others Ray has no settings at all.
    """
    from ray._private import parameter, ray_constants, services, utils

    def python(component: str, *arguments: Any, **options: Any) -> list[str]:
        if component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT:
            return [sys.executable, "-IS", dashboard_agent.__file__]
        return list(build(component, *arguments, **options))

    scripts = {"setup_worker_path": worker_setup.__file__} if asks_servers else {}
    build = services._build_python_executable_command_memory_profileable
    with ExitStack() as changes:
        for holder, name, value in (
            (services, "start_api_server", lambda *_, **__: (None, None)),
            (services, build.__name__, python),
            (utils, "get_dashboard_dependency_error", lambda: ImportError("not asked for")),  # imports them to see
            (
                parameter,
                "RayParams",
                partial(parameter.RayParams, no_monitor=True, include_log_monitor=False, **scripts),
            ),
        ):
            changes.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, value)
        yield


def _has_raylet() -> bool:
    """Whether a raylet that this process has started is still running."""
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.name() == "raylet" and child.status() != psutil.STATUS_ZOMBIE:
                return True
    return False
