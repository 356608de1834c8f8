"""Command-line options of the launchers, besides the fields of the recipe."""

import re
from typing import Literal

from gtpo_megatron.cli.recipe import AnyRecipeOptions
from gtpo_megatron.companions.planner.hardware import GIB
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.config.sft import SftConfig
from gtpo_megatron.errors import ConfigError
from launchers.own_settings import check_env, check_sbatch
from launchers.script_values import check_name, check_options

IMAGE = re.compile(r"[\w./+@:~=][\w./+@:#~=-]*")
MOUNT = re.compile(r"[\w./+@:=-]+")
"""Characters that srun's options can have without quotes."""

MEMORY = re.compile(r"(\d+)([KMGT]?)", re.IGNORECASE)
MEMORY_UNITS = {"K": 1 << 10, "M": 1 << 20, "": 1 << 20, "G": 1 << 30, "T": 1 << 40}
"""Slurm's units of memory; mebibytes by default."""


@configuration
class LaunchOptions(AnyRecipeOptions):
    """Options of every launcher.

    Attributes:
        run_dir: folder of the run, on a disk shared by all nodes; empty means ``runs/<name>``.
        dry_run: write and check everything, start nothing.
    """

    run_dir: str = ""
    dry_run: bool = False

    @property
    def run(self) -> RunConfig:
        """What the ranks are started with: the recipe, or the run that a warm start's ranks are of."""
        return self.config.of_ranks() if isinstance(self.config, SftConfig) else self.config

    @property
    def command(self) -> str:
        """The command of ``gtpo-megatron`` that runs the recipe."""
        return "sft" if isinstance(self.config, SftConfig) else "train"

    @property
    def has_engines(self) -> bool:
        """Whether the recipe samples; a warm start has ranks alone."""
        return not isinstance(self.config, SftConfig)

    def check(self) -> None:
        """Checks that options can be written into scripts.

        Raises:
            ConfigError: an option, or the recipe's name, cannot be written into one, or looks like a secret.
        """
        check_name("--name", self.config.name)
        check_options(self)


@configuration
class SlurmOptions(LaunchOptions):
    """Options of the Slurm launcher.

    Attributes:
        account: account that is charged.
        partition: partition of the cluster.
        nodes: number of nodes.
        gpus_per_node: 0 for a run on CPUs.
        request_gpus: ask Slurm for them; not where a site's Slurm does not count GPUs, or ``sbatch`` asks otherwise.
        time: limit of one job: minutes, hours:minutes:seconds, or days-hours.
        stop_before_s: how long before the time limit the driver is asked to save and stop; at least a step, or the
            measurement of a held-out set, and a save.
        restarts: how often a job may be put back into the queue.
        chain: jobs submitted at once, each resuming the previous one; for clusters without requeueing.
        detach: return after the submission instead of waiting for the end.
        preflight: check the nodes with one step of the recipe instead of training; see docs/preflight.md.
        preflight_s: seconds for all checks of it.
        skip: checks that the preflight leaves out, by name.
        container: image that the job runs in (pyxis): a file, or a name in a registry.
        container_mount: further ``SOURCE:TARGET`` folders inside the container.
        gpu: kind of GPU, for the memory plan.
        gpu_memory_gib: memory per GPU; 0: that of ``gpu``.
        cpus_per_task: cores of a node for the job; 0 leaves it to Slurm.
        mem: memory of a node for the job, such as ``900G``; empty: all of it if ``exclusive``, else the site's default.
        host_memory_gib: memory of a node, for the memory plan; 0: that of ``mem``, or not checked if empty.
        exclusive: no other job on these nodes.
        sbatch: further ``name=value`` options of sbatch, such as ``qos=high``.
        env: ``NAME=VALUE`` for every process that the job starts; written into the scripts, so no secrets: those travel
            with the environment that you submit from.
        python: interpreter on the nodes; empty: this one, or ``python`` inside a container.
        network_interface: interface for gloo and NCCL; empty: the one by which nodes reach each other.
        ray_port: port of the Ray head; 0: any free one.
    """

    account: str = ""
    partition: str = ""
    nodes: int = 1
    gpus_per_node: int = 8
    request_gpus: bool = True
    time: str = "04:00:00"
    stop_before_s: int = 900
    restarts: int = 20
    chain: int = 1
    detach: bool = False
    preflight: bool = False
    preflight_s: int = 600
    skip: tuple[str, ...] = ()
    container: str = ""
    container_mount: tuple[str, ...] = ()
    gpu: Literal["h100", "h200", "a100", "b200", "b300"] = "h100"
    gpu_memory_gib: float = 0.0
    cpus_per_task: int = 0
    mem: str = ""
    host_memory_gib: float = 0.0
    exclusive: bool = True
    sbatch: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    python: str = ""
    network_interface: str = ""
    ray_port: int = 0

    def check(self) -> None:
        """Checks options that are invalid on every cluster.

        Raises:
            ConfigError: an option lacks its value, or has an invalid one.
        """
        check_env(self.env)  # first, since its message about secrets is better
        LaunchOptions.check(self)  # zero-argument super() breaks under slots=True
        check_sbatch(self.sbatch)
        if self.python.startswith("-"):
            raise ConfigError(f"--python {self.python!r}: must be the name or path of an interpreter")
        for name, value in (("account", self.account), ("partition", self.partition)):
            if not value.strip():
                raise ConfigError(f"--{name} is missing; `sacctmgr show assoc user=$USER` and `sinfo` list yours")
        for name, number, least in (
            ("nodes", self.nodes, 1),
            ("gpus-per-node", self.gpus_per_node, 0),
            ("stop-before-s", self.stop_before_s, 1),
            ("restarts", self.restarts, 0),
            ("chain", self.chain, 1),
            ("preflight-s", self.preflight_s, 1),
            ("cpus-per-task", self.cpus_per_task, 0),
        ):
            if number < least:
                raise ConfigError(f"--{name} {number}: must be {least} or more")
        self._check_preflight()
        if not 0 <= self.ray_port < 65536:
            raise ConfigError(f"--ray-port {self.ray_port}: must be a port number, or 0 for any free one")
        if self.host_memory_gib < 0:
            raise ConfigError(f"--host-memory-gib {self.host_memory_gib}: must be 0 or more")
        if self.mem and not MEMORY.fullmatch(self.mem):
            raise ConfigError(f"--mem {self.mem!r}: must be a whole number and K, M, G or T, such as 900G")
        self._check_container()

    @property
    def host_memory_bytes(self) -> float:
        """Memory of a node; 0 if unknown: ``--mem 0`` means all memory of a node."""
        written = MEMORY.fullmatch(self.mem)
        if self.host_memory_gib or written is None:
            return self.host_memory_gib * GIB
        return int(written[1]) * MEMORY_UNITS[written[2].upper()]

    def _check_preflight(self) -> None:
        if self.preflight and not self.has_engines:
            raise ConfigError("--preflight: it makes a step of a run; take a recipe of one, in the same layout")
        if self.preflight and self.chain > 1:
            raise ConfigError(f"--preflight --chain {self.chain}: a preflight is one job; leave out --chain")
        if self.skip and not self.preflight:
            raise ConfigError(f"--skip {' '.join(self.skip)}: a run has no checks to leave out; add --preflight")

    def _check_container(self) -> None:
        for mount in self.container_mount:
            if not self.container or len(mount.split(":")) not in (2, 3):
                raise ConfigError(f"--container-mount {mount!r}: must be SOURCE:TARGET, and needs --container")
            if not MOUNT.fullmatch(mount):
                raise ConfigError(f"--container-mount {mount!r}: srun takes no blanks, commas or quotes in it")
        if self.container and not IMAGE.fullmatch(self.container):
            raise ConfigError(f"--container {self.container!r}: srun takes no blanks, commas or quotes in it")
