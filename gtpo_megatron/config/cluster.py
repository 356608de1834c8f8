"""Ray and its processes."""

import re
from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.errors import ConfigError

_ADDRESS = re.compile(r"(?:\[[\w.:%]+\]|[\w.:%-]+):([0-9]{1,5})", re.ASCII)


@configuration
class ClusterConfig:
    """Where the processes of a run live.

    Attributes:
        mode: ``ray`` starts one actor a rank; ``local`` runs everything in this process (one rank; tests, debugging).
        address: ``host:port`` of a running Ray head, or ``auto``, which asks Ray; empty starts one of the run's own.
        num_nodes: machines that must have joined the Ray at ``address`` before processes are placed.
        num_cpus: logical cores that a Ray of the run's own offers.
        object_store_mib: shared memory for batches between processes.
        threads_per_rank: threads of a trainer rank, on a CPU.
        engine_threads: threads of a vLLM engine with a process of its own, on a CPU; 0: its share of the node's cores.
        start_deadline_s: time by which every process must be up: for the nodes, Ray, the ranks and the engines
            together.
        stage_deadline_s: longest time a stage may take before the run stops and names who has not answered.
    """

    mode: Literal["ray", "local"] = "ray"
    address: str = ""
    num_nodes: PositiveInt = 1
    num_cpus: PositiveInt = 2
    object_store_mib: PositiveInt = 1024
    threads_per_rank: PositiveInt = 1
    engine_threads: NonNegativeInt = 0
    start_deadline_s: PositiveFloat = 600.0
    stage_deadline_s: PositiveFloat = 1800.0

    def __post_init__(self) -> None:
        self._check_address()
        if self.num_nodes > 1 and not self.address:
            raise ConfigError(
                f"num_nodes={self.num_nodes} needs the address of a Ray head that the others can join; a launcher "
                f"(python -m launchers.slurm) sets both"
            )

    def _check_address(self) -> None:
        if self.address in ("", "auto"):
            return
        written = _ADDRESS.fullmatch(self.address)
        if written is None or not 0 < int(written[1]) < 65536:
            raise ConfigError(
                f"address={self.address!r}: must be host:port of a running Ray head, such as 10.0.0.7:6379, or empty "
                f"for a Ray of the run's own"
            )
