"""The processes of a run as Ray actors: each runs functions of its one object, which ``in_process`` has too."""

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from gtpo_megatron.config.serialize import from_plain
from gtpo_megatron.distributed.groups import RankCoordinates
from gtpo_megatron.distributed.rendezvous import Rendezvous
from gtpo_megatron.observability.logs import rank_prefix, set_up_logs
from gtpo_megatron.orchestration.on_ray.collect import CHECK_S
from gtpo_megatron.orchestration.stages.rollouts import Chunk, handles_then_chunks

if TYPE_CHECKING:
    from gtpo_megatron.actor.actor import MegatronActor  # noqa: F401 - in a base class, by its name
    from gtpo_megatron.orchestration.stages.grading import RewardGrader  # noqa: F401
    from gtpo_megatron.rollout.engine_nodes import EngineNode, FollowingWorkers  # noqa: F401
    from gtpo_megatron.rollout.vllm_engine import VllmEngine

logger = logging.getLogger(__name__)

Instance = TypeVar("Instance")
Result = TypeVar("Result")


class _RayProcess(Generic[Instance]):
    """Base of the run's processes, each of one ``Instance``: sets up logs and module path.

    Args:
        config: configuration of the run, as ``to_plain`` made it.
        run_folder: folder of ``log.txt``.
        prefix: beginning of its log lines.
        search_path: put first on the module path, as in the driver, so that the user's modules are found.

    Attributes:
        instance: the object that functions are called with; None before it has started.
    """

    def __init__(self, config: dict[str, Any], run_folder: str, prefix: str, search_path: str) -> None:
        if search_path not in sys.path:
            sys.path.insert(0, search_path)
        self._config = from_plain(config, "the configuration of the run")
        self._run_folder = Path(run_folder)
        self.instance: Instance | None = None
        self._set_up_logs(prefix)

    def _set_up_logs(self, prefix: str) -> None:
        set_up_logs(level=self._config.logging.log_level, run_folder=self._run_folder, prefix=prefix)

    def identity(self) -> tuple[str, int]:
        """Host name and process id."""
        return socket.gethostname(), os.getpid()

    def run(self, function: Callable[[Instance], Result]) -> Result:
        """``function(instance)``; what is run before the start takes any object."""
        return function(cast("Instance", self.instance))


class RankProcess(_RayProcess["MegatronActor"]):
    """A Megatron rank."""

    def __init__(self, config: dict[str, Any], run_folder: str, search_path: str, *, global_rank: int) -> None:
        super().__init__(config, run_folder, rank_prefix(global_rank), search_path)
        self._global_rank = global_rank
        self._rendezvous: Rendezvous | None = None

    def rendezvous(self) -> str:
        """Opens a rendezvous on this node, with this process as rank 0; returns its ``init_method``."""
        import ray

        self._rendezvous = Rendezvous(ray.util.get_node_ip_address())
        return self._rendezvous.init_method

    def gpu_ids(self) -> list[int]:
        """The GPUs that Ray assigned to this process."""
        import ray

        return [int(gpu) for gpu in ray.get_gpu_ids()]

    def start(self, init_method: str) -> RankCoordinates:
        """Joins the world and builds the model; must be called on all ranks at once."""
        import ray

        from gtpo_megatron.actor.actor import MegatronActor

        self.instance = actor = MegatronActor(
            self._config,
            global_rank=self._global_rank,
            init_method=init_method,
            run_folder=self._run_folder,
            address=ray.util.get_node_ip_address(),
        )
        coordinates = actor.coordinates
        self._set_up_logs(
            rank_prefix(
                self._global_rank,
                tp=coordinates.tensor_index,
                pp=coordinates.pipeline_index,
                cp=coordinates.context_index,
                dp=coordinates.data_index,
            )
        )
        return coordinates


WORKER_DEATH_S = 2.0
"""How long a failed call waits for the death of a worker, whose peers may report their broken collective first. Less
than ``collect.GRACE_S``, so that the reason is still reported."""


class EngineProcess(_RayProcess["VllmEngine"]):
    """A rollout engine.

    With several workers vLLM starts processes for them. If one of them dies, this process ends too. On further nodes of
    the engine they are of followers, actors that this process starts, watches, and takes with it.

    Args:
        config: configuration of the run, as ``to_plain`` made it.
        run_folder: folder of ``log.txt``.
        search_path: put first on the module path.
        prefix: beginning of its log lines.
        followers: of each further node, Ray's options for the follower there, and the beginning of its log lines.
    """

    def __init__(
        self,
        config: dict[str, Any],
        run_folder: str,
        search_path: str,
        *,
        prefix: str,
        followers: Sequence[tuple[dict[str, Any], str]] = (),
    ) -> None:
        super().__init__(config, run_folder, prefix, search_path)
        self._arguments = (config, run_folder, search_path)
        self._wanted = followers
        self._followers: list[Any] = []

    def start(self) -> None:
        """Loads vLLM and the model."""
        from gtpo_megatron.rollout.vllm_engine import VllmEngine

        node = self._start_followers() if self._wanted else None
        self.instance = engine = VllmEngine(
            self._config.model.path,
            self._config.rollout,
            max_sequence_tokens=self._config.model.max_sequence_tokens,
            seed=self._config.seed,
            environment=self._config.environment.within(self._config.cluster.stage_deadline_s),
            data=self._config.data,
            awaits_push=True,
            adapter=self._config.adapter,
            node=node,
        )
        engine.on_worker_death(self._end)

    def _start_followers(self) -> "EngineNode":
        """Starts the followers, and a thread that ends this process if one of them ends; returns this node."""
        import ray

        from gtpo_megatron.rollout.engine_nodes import EngineNode

        address = _tell_own_address()
        node = EngineNode(number=0, num_nodes=1 + len(self._wanted), address=address, port=_free_port(address))
        kind, calls = ray.remote(FollowerProcess), []
        for number, (options, prefix) in enumerate(self._wanted, start=1):
            follower = kind.options(**options).remote(*self._arguments, prefix=prefix)
            calls.append(follower.serve.remote(replace(node, number=number)))
            self._followers.append(follower)

        def watch() -> None:
            ended: list[Any] = []
            while not ended and self._followers:
                ended, _ = ray.wait(calls, timeout=CHECK_S)
            if self._followers:
                self._end()

        threading.Thread(target=watch, daemon=True, name="watch followers").start()
        return node

    def run(self, function: "Callable[[VllmEngine], Result]") -> Result:
        """As for any process; ends it if a worker has died, or the call fails because one does."""
        self._end_without_worker()
        try:
            return super().run(function)
        except Exception:
            deadline = time.monotonic() + WORKER_DEATH_S
            while self._has_workers() and time.monotonic() < deadline:
                self._end_without_worker()
                time.sleep(0.05)
            raise

    def sample(self, function: "Callable[[VllmEngine], Mapping[Hashable, Chunk]]") -> Iterator[Any]:
        """Of ``function(instance)``, chunks by key, yields all handles, then each chunk; see ``received``."""
        yield from handles_then_chunks(self.run(function))

    def identity(self) -> tuple[str, int]:
        """Host name and process id; fails if a worker has died."""
        self._end_without_worker()
        return super().identity()

    def close(self) -> None:
        """Ends the workers and frees their shared memory."""
        import ray

        followers, self._followers = self._followers, []
        if self.instance is not None:
            self.instance.close()
        for follower in followers:
            ray.kill(follower)

    def _has_workers(self) -> bool:
        return self.instance is not None and self._config.rollout.ranks_per_engine > 1

    def _end_without_worker(self) -> None:
        if self.instance is not None and self._has_workers() and self.instance.has_lost_worker():
            self._end()

    def _end(self) -> None:
        logger.error("a worker of this engine died; the engine ends with it")
        os._exit(1)  # immediately, because vLLM's cleanup would wait for the dead worker


class FollowerProcess(_RayProcess["FollowingWorkers"]):
    """The workers of an engine on one of its further nodes."""

    def __init__(self, config: dict[str, Any], run_folder: str, search_path: str, *, prefix: str) -> None:
        super().__init__(config, run_folder, prefix, search_path)

    def serve(self, node: "EngineNode") -> None:
        """Starts the workers, and waits for this process's end: with the engine's, or with the first worker's."""
        from gtpo_megatron.rollout.vllm_engine import follow

        _tell_own_address()
        self.instance = follow(
            self._config.model.path,
            self._config.rollout,
            max_sequence_tokens=self._config.model.max_sequence_tokens,
            seed=self._config.seed,
            adapter=self._config.adapter,
            node=node,
            on_death=self._end,
        )
        logger.info("process %d has the workers of node %d of the engine", os.getpid(), node.number)
        threading.Event().wait()

    def _end(self) -> None:
        logger.error("a worker of this engine died on this node; the engine ends with it")
        os._exit(1)


def _tell_own_address() -> str:
    """Has vLLM listen where Ray does, on one of this node's addresses; returns that."""
    import ray

    address = str(ray.util.get_node_ip_address())
    os.environ["VLLM_HOST_IP"] = address
    return address


def _free_port(address: str) -> int:
    """A port of this machine that nobody has; vLLM's workers bind it when they have loaded their libraries."""
    family, _, _, _, bound = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind(bound)
        return int(probe.getsockname()[1])


class RewardProcess(_RayProcess["RewardGrader"]):
    """Decoding and grading."""

    def __init__(self, config: dict[str, Any], run_folder: str, search_path: str) -> None:
        super().__init__(config, run_folder, "[reward]", search_path)

    def start(self) -> None:
        """Loads the tokenizer and starts the grading workers."""
        from gtpo_megatron.orchestration.stages.grading import build_grader

        self.instance = build_grader(self._config, self._run_folder)
