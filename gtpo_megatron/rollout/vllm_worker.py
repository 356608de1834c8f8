"""What runs inside every vLLM worker: our weight-transfer engine and the questions that the driver asks of it.

vLLM imports this module by name in each worker process (``worker_extension_cls``); importing it registers the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from gtpo_megatron.rollout.sampled_entropy import SampledEntropy
from gtpo_megatron.weights.checksum import tensor_checksum
from gtpo_megatron.weights.hf_buffer import BufferLayout, HFBuffer

BACKEND = "gtpo_shared_memory"
"""Name under which vLLM knows our engine."""


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """Where the buffer is; fields of ``BufferLayout``."""

    path: str
    dtype_name: str
    shapes: dict[str, tuple[int, ...]]


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """Which version the buffer holds now."""

    version: int


class SharedMemoryEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """Loads a model's weights from a buffer that the trainer's ranks have written.

    Linear weights are prepacked on a CPU, so ``model.load_weights`` alone fails and leaves wrong weights behind: vLLM's
    layerwise reload unpacks before and repacks after.
    """

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """Maps the buffer."""
        layout = BufferLayout(
            path=init_info.path,
            dtype_name=init_info.dtype_name,
            shapes={name: tuple(shape) for name, shape in init_info.shapes.items()},
        )
        self.buffer: HFBuffer | None = HFBuffer(layout)
        self.version = -1

    def start_weight_update(self) -> None:
        """Makes the model ready to take new weights."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads every tensor. vLLM's own version waits for an accelerator, which a CPU has not."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Loads every tensor of the buffer."""
        assert self.buffer is not None
        self.model.load_weights(self.buffer.items())
        self.version = update_info.version

    def finish_weight_update(self) -> None:
        """Post-processes the loaded weights (prepacking, quantisation)."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Lets go of the buffer."""
        self.buffer = None

    def checksums(self) -> dict[str, int]:
        """Checksum of every tensor as it was read. Whether vLLM loaded it well is for the log-prob gap to show."""
        assert self.buffer is not None
        return {name: tensor_checksum(tensor) for name, tensor in self.buffer.items()}


class WorkerExtension:
    """Methods that vLLM adds to its worker; called through ``collective_rpc``."""

    weight_transfer_engine: SharedMemoryEngine
    model_runner: Any
    rank: int

    def gtpo_received_checksums(self) -> dict[str, int]:
        """Checksum of every tensor that the last push delivered to this worker."""
        return self.weight_transfer_engine.checksums()

    def gtpo_policy_version(self) -> int:
        """Version of the weights this worker generates from."""
        return self.weight_transfer_engine.version

    def gtpo_take_entropies(self, responses: Sequence[int]) -> tuple[dict[int, list[float]], int] | None:
        """Entropies of finished responses, and the columns that took part; of the first worker.

        All workers sample the same, so the others only forget theirs.
        """
        (recorder,) = (
            found for found in self.model_runner.input_batch.logitsprocs.all if isinstance(found, SampledEntropy)
        )
        taken = recorder.take(responses)
        return (taken, recorder.vocab_size) if self.rank == 0 else None

    def gtpo_set_threads(self, num_threads: int) -> None:
        """Threads that this worker computes with, on a CPU."""
        torch.set_num_threads(num_threads)


if BACKEND not in WeightTransferEngineFactory._registry:  # a second import under another name must not fail
    WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryEngine)
