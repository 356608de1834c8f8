"""Records the machines of a run in its log, as soon as its processes are on them."""

import logging
import os
import shutil
import subprocess

from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.errors import GTPOError
from gtpo_megatron.orchestration.stages.processes import RunProcesses
from gtpo_megatron.run_folder import provenance

logger = logging.getLogger(__name__)

QUERY_TIMEOUT_S = 20.0
ANSWER_S = 40.0
"""Time for all answers; a node that is busy starting processes is slow."""


def record_machines(config: RunConfig, processes: RunProcesses) -> None:
    """Logs name and number of a run's GPUs, and the CPUs of its hosts; the run goes on without the record.

    One process per host answers.
    """
    by_host = {host: name for name, host in processes.hosts.items()}
    try:
        found = processes.run(hardware, dict.fromkeys(by_host.values(), ()), deadline_s=ANSWER_S)
    except GTPOError as error:
        logger.warning("the machines of this run are not recorded: %s", error)
        return
    names = sorted({name for gpus, _ in found.values() for name in gpus})
    provenance.log_machines(
        provenance.Machines(
            num_gpus=(num_gpus(config) if processes.engines else config.parallel.num_ranks) if names else 0,
            gpu=" and ".join(names),
            num_cpus=sum(cpus for _, cpus in found.values()),
            num_hosts=len(found),
        )
    )


def num_gpus(config: RunConfig) -> int:
    """GPUs that the run uses, if its machines have any."""
    of_ranks = config.parallel.num_ranks
    if config.cluster.mode != "ray" or config.rollout.placement == "colocated":
        return of_ranks  # engines share them
    return of_ranks + config.rollout.num_engines * config.rollout.ranks_per_engine


def hardware(_held: object = None) -> tuple[list[str], int]:
    """Names of this host's GPUs and the number of its CPUs.

    The driver's tool is asked and not torch, which would make a context on each GPU.
    """
    cpus = os.cpu_count() or 0
    if shutil.which("nvidia-smi") is None:
        return [], cpus
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):  # a host without a driver
        return [], cpus
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()], cpus
