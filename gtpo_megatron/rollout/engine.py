"""What the training loop needs of a sampler."""

from typing import Protocol

from gtpo_megatron.batch import PromptBatch, RolloutBatch
from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.weights.hf_buffer import BufferLayout


class RolloutEngine(Protocol):
    """A sampler with weights that can be replaced."""

    def generate(
        self, prompts: PromptBatch, sampling: SamplingConfig, *, samples_per_prompt: int, seed: int
    ) -> RolloutBatch:
        """Samples responses; rows are prompt-major: all samples of prompt 0, then of prompt 1, ...

        The same arguments and weights give the same responses: sample ``j`` of a prompt has a seed made of ``seed``,
        the prompt's group id and ``j`` alone.
        """
        ...

    def connect_weights(self, layout: BufferLayout) -> None:
        """Maps the buffer that new weights arrive in; before the first ``load_weights``."""
        ...

    def load_weights(self, version: int) -> None:
        """Takes the weights that the buffer holds now and forgets everything computed from the old ones."""
        ...

    def received_checksums(self) -> list[dict[str, int]]:
        """Checksum of every tensor of the last push, one dictionary a worker."""
        ...
