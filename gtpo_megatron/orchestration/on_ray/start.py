"""Starts the processes of a run as Ray actors, waits for them, and restarts engines."""

import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.config.serialize import to_plain
from gtpo_megatron.distributed.groups import RankCoordinates
from gtpo_megatron.errors import GTPOError
from gtpo_megatron.observability.profiling import nsight_options
from gtpo_megatron.orchestration.on_ray.collect import Deadline, collect
from gtpo_megatron.orchestration.on_ray.environment import engine_variables, rank_variables, reward_variables
from gtpo_megatron.orchestration.on_ray.fleet import engine_names
from gtpo_megatron.orchestration.on_ray.placement import ClusterNode, Placement
from gtpo_megatron.orchestration.on_ray.processes import EngineProcess, RankProcess, RewardProcess
from gtpo_megatron.orchestration.on_ray.worker_servers import WorkerServers
from gtpo_megatron.orchestration.on_ray.worker_setup import SERVER

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from gtpo_megatron.rollout.vllm_engine import VllmEngine

logger = logging.getLogger(__name__)

REWARD_NAME = "reward process"

END_DEADLINE_S = 20.0
"""Timeout for an engine to end its workers."""

Met = Callable[[str, int], None]

Starting = Callable[[str, str], None]
"""Takes what the start is doing, and how far it is."""


def rank_name(index: int) -> str:
    """Name of a rank in messages."""
    return f"rank {index}"


class ProcessStarter:
    """Starts a run's processes as Ray actors, without Ray's restarts, after which weights and state would be missing.

    Args:
        config: configuration of the run.
        run_folder: folder of the processes' logs.
        placement: nodes of the processes.
        processes: filled with the actors, by name.
        temp_folder: temporary folder of the processes on the driver's node.
        servers: make workers on the driver's node; None: each imports for itself.
    """

    def __init__(
        self,
        config: RunConfig,
        run_folder: Path,
        placement: Placement,
        processes: dict[str, Any],
        *,
        temp_folder: Path,
        servers: WorkerServers | None = None,
    ) -> None:
        self._servers = servers
        self._temp_folder = temp_folder
        self._config = config
        self._placement = placement
        self._processes = processes
        self._run_folder = run_folder.resolve()
        # as plain values: a class from a file of the user's own is unpickled only where that file has been loaded
        self._common = (to_plain(config), str(self._run_folder), str(Path.cwd()))

    def ranks(self) -> None:
        """Starts one actor per rank."""
        for index in range(self._config.parallel.num_ranks):
            self._processes[rank_name(index)] = self._rank(index)

    def engines_and_rewards(self, deadline: Deadline) -> None:
        """Starts one actor per engine, after the ranks, and the reward process, within ``deadline``, of the start.

        An environment gives its rewards in the engines: then there is no reward process.
        """
        for index in range(self._config.rollout.num_engines):
            self.engine(index, deadline)
        if not self._config.environment.name:
            variables = reward_variables(has_gpus=self._placement.has_gpus)
            options = self._options(self._placement.reward, num_gpus=0, variables=variables)
            self._processes[REWARD_NAME] = self._actor(RewardProcess, options)

    def engine(self, index: int, deadline: Deadline) -> None:
        """Starts or replaces an engine within ``deadline``."""
        rollout = self._config.rollout
        prefix = "engine" if rollout.num_engines == 1 else f"engine {index}"
        options = [self._engine_options(index, number, deadline) for number in range(rollout.nodes_per_engine)]
        self._processes[engine_names(rollout.num_engines)[index]] = self._actor(
            EngineProcess,
            options[0],
            prefix=f"[{prefix}]",
            # which the process starts itself, so that Ray ends them with it
            followers=[(further, f"[{prefix} node {number}]") for number, further in enumerate(options) if number],
        )

    def _engine_options(self, index: int, number: int, deadline: Deadline) -> dict[str, Any]:
        """Ray's options for an engine's process on its node of this number."""
        rollout = self._config.rollout
        shares_gpus = rollout.placement == "colocated" and self._placement.has_gpus
        variables = engine_variables(self._config, self._placement, index)
        part = index * rollout.nodes_per_engine + number
        return self._options(
            self._placement.engines[index][number],
            num_gpus=0 if shares_gpus else rollout.ranks_per_node,
            variables=variables | (self._gpus_of_ranks(part, deadline) if shares_gpus else {}),
        )

    def _gpus_of_ranks(self, part: int, deadline: Deadline) -> dict[str, str]:
        """Environment of a part of an engine that shares its ranks' GPUs: their ids; Ray assigns none."""
        size = self._config.rollout.ranks_per_node
        ranks = [rank_name(rank) for rank in range(part * size, (part + 1) * size)]
        ids = collect(
            {rank: self._processes[rank].gpu_ids.remote() for rank in ranks},
            stage="start",
            deadline_s=deadline,
        )
        visible = ",".join(str(gpu) for rank in ranks for gpu in ids[rank])
        return {"CUDA_VISIBLE_DEVICES": visible, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}

    def _rank(self, index: int) -> Any:
        options = self._options(
            self._placement.ranks[index],
            num_gpus=1,
            variables=rank_variables(self._config, has_gpus=self._placement.has_gpus),
            nsight=nsight_options(self._config.profile, rank=index, run_folder=self._run_folder),
        )
        return self._actor(RankProcess, options, global_rank=index)

    def _actor(self, kind: type, options: dict[str, Any], **kwargs: Any) -> Any:
        import ray

        return ray.remote(kind).options(**options).remote(*self._common, **kwargs)

    def _options(
        self,
        node: ClusterNode,
        *,
        num_gpus: int,
        variables: dict[str, str],
        nsight: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Ray's options for a process on this node."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        server = self._servers.address_for(variables) if self._servers is not None else ""
        if node.node_id == self._placement.reward.node_id:
            variables = variables | {"TMPDIR": str(self._temp_folder)}
        if server:
            variables = variables | {SERVER: server}
        under_nsight = {"nsight": nsight} if nsight and self._placement.has_gpus else {}
        return {
            "num_cpus": 0,
            "num_gpus": num_gpus if self._placement.has_gpus else 0,
            "runtime_env": {"env_vars": variables, **under_nsight},
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=False),
        }


def bring_up(
    config: RunConfig,
    processes: dict[str, Any],
    ranks: "list[ActorHandle[RankProcess]]",
    *,
    deadline: Deadline,
    met: Met,
    starting: Starting | None = None,
) -> list[RankCoordinates]:
    """Waits until every process has started; returns the ranks' coordinates.

    Engines that share the ranks' GPUs start first and sleep, because both would not fit.

    Args:
        config: configuration of the run.
        processes: processes by name.
        ranks: the ranks among them, in order.
        deadline: limit of the whole start, of which a part is over.
        met: called with name and process id of every process on this machine.
        starting: told what is waited for; None: nobody is.
    """
    _meet(processes, deadline, met, starting)
    waiting = dict(processes)
    if config.rollout.placement == "colocated":
        engines = {name: waiting.pop(name) for name in engine_names(config.rollout.num_engines)}
        loading = {name: engine.start.remote() for name, engine in engines.items()}
        answered = counted("loading the engines", engines, starting)
        collect(loading, stage="start", deadline_s=deadline, answered=answered)
        falling_asleep = {name: engine.run.remote(_fall_asleep) for name, engine in engines.items()}
        collect(falling_asleep, stage="start", deadline_s=deadline)
    meeting = collect({"rank 0": ranks[0].rendezvous.remote()}, stage="start", deadline_s=deadline)["rank 0"]
    calls = {rank_name(index): rank.start.remote(meeting) for index, rank in enumerate(ranks)}
    calls |= {name: process.start.remote() for name, process in waiting.items() if name not in calls}
    answered = counted("loading", calls, starting)
    answers = collect(calls, stage="start", deadline_s=deadline, answered=answered)
    return [answers[rank_name(index)] for index in range(len(ranks))]


def _fall_asleep(engine: "VllmEngine") -> None:
    engine.sleep(keep_weights=False)


def bring_up_engine(name: str, process: "ActorHandle[EngineProcess]", *, deadline: Deadline, met: Met) -> None:
    """Waits until a replacement engine has started."""
    _meet({name: process}, deadline, met, None)
    collect({name: process.start.remote()}, stage="restart", deadline_s=deadline)


def end_in_order(processes: dict[str, Any], engines: list[str]) -> None:
    """Lets engines free what they share with their workers; who calls this kills all processes afterwards.

    An engine that does not answer is a warning.
    """
    try:
        collect({name: processes[name].close.remote() for name in engines}, stage="end", deadline_s=END_DEADLINE_S)
    except GTPOError as error:
        logger.warning("an engine did not end in good order: %s", error)


def _meet(processes: dict[str, Any], deadline: Deadline, met: Met, starting: Starting | None) -> None:
    identities = collect(
        {name: process.identity.remote() for name, process in processes.items()},
        stage="start",
        deadline_s=deadline,
        answered=counted("starting the processes", processes, starting),
    )
    for name, (host, pid) in identities.items():
        logger.info("%s: process %d on %s", name, pid, host)
        if host == socket.gethostname():
            met(name, pid)


def counted(doing: str, names: Iterable[str], starting: Starting | None) -> Callable[[str], None] | None:
    """Says ``doing`` with ``ranks 0 of 2 · engines 0 of 1``, and again for each process that has answered.

    Args:
        doing: word for what the processes do.
        names: names of the processes, as in messages.
        starting: callback for the terminal; None: there is none.

    Returns:
        Takes the name of a process that has answered; None if nobody is told.
    """
    if starting is None:
        return None
    total = Counter(map(_kind, names))
    answered: Counter[str] = Counter()

    def say() -> None:
        starting(doing, " · ".join(f"{kind} {answered[kind]} of {num}" for kind, num in total.items()))

    def takes(name: str) -> None:
        answered[_kind(name)] += 1
        say()

    say()
    return takes


def _kind(name: str) -> str:
    """Of ``rank 3``, ``rollout engine 1`` or ``reward process``."""
    if name.startswith("rank "):
        return "ranks"
    return "engines" if "engine" in name else "graders"
