"""What runs inside every vLLM worker: our weight-transfer engine and the questions that the driver asks of it.

vLLM imports this module by name in each worker process (``worker_extension_cls``); importing it registers the engine.
"""

from collections.abc import Sequence
from typing import Any

import torch

from gtpo_megatron.rollout import weight_engine
from gtpo_megatron.rollout.sampled_entropy import SampledEntropy

weight_engine.register()


class WorkerExtension:
    """Methods that vLLM adds to its worker; called through ``collective_rpc``."""

    weight_transfer_engine: weight_engine.LinkEngine
    model_runner: Any
    rank: int

    def gtpo_received_checksums(self) -> tuple[int, dict[str, int]]:
        """This worker's number, and the checksum of everything that the last push delivered to it."""
        return self.weight_transfer_engine.worker, self.weight_transfer_engine.checksums()

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
