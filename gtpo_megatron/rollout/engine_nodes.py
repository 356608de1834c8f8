"""The nodes of one engine: the first has vLLM's engine core and some of its workers, every other one workers alone.

vLLM's multiprocessing executor does it (``nnodes``, ``node_rank``): workers of all nodes meet at one address, calls and
results travel over ZeroMQ, tensors over NCCL or gloo. Not its executor over Ray: that makes each worker an actor with
GPUs of a placement group, which ranks have already where both share them, and vLLM's CPU build refuses it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineNode:
    """A node of an engine that has several.

    Attributes:
        number: from 0, the one with the engine core.
        num_nodes: nodes of the engine.
        address: address of the first one, where all workers meet.
        port: a free port there.
    """

    number: int
    num_nodes: int
    address: str
    port: int

    def arguments(self) -> dict[str, Any]:
        """Arguments of vLLM."""
        return {
            "distributed_executor_backend": "mp",
            "nnodes": self.num_nodes,
            "node_rank": self.number,
            "master_addr": self.address,
            "master_port": self.port,
        }


class FollowingWorkers:
    """The workers of an engine on a node other than its first; the engine core calls them itself.

    Args:
        arguments: vLLM's, the same as the engine's but for the number of the node.
        on_death: called in another thread when one of the workers has died.
    """

    def __init__(self, arguments: dict[str, Any], on_death: Callable[[], None]) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        config = EngineArgs(**arguments).create_engine_config(headless=True)
        self._executor = MultiprocExecutor(config)
        self._executor.register_failure_callback(on_death)
