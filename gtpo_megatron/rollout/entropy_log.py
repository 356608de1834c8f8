"""Entropies of sampled tokens, kept by response and position until the responses are finished."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gtpo_megatron.errors import RolloutError


class EntropyLog:
    """What a worker's logits processor has computed.

    Values that vLLM computes again after a preemption are replaced. Nothing is copied to the host before ``take``.

    Attributes:
        vocab_size: columns of the last logits.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[list[int], list[int], Tensor]] = []
        self._values: dict[int, list[float]] = {}
        self.vocab_size = 0

    def note(self, responses: list[int], positions: list[int], entropy: Tensor) -> None:
        """Keeps a decode step.

        Args:
            responses: their numbers.
            positions: the number of tokens that each response has before the sampled one.
            entropy: ``[responses]``, on any device.
        """
        self._steps.append((responses, positions, entropy))

    def take(self, responses: Sequence[int]) -> dict[int, list[float]]:
        """Removes and returns the entropies of finished responses, one per sampled token.

        The last value may belong to a token after a stop that vLLM did not return; callers must cut it.

        Raises:
            RolloutError: values of a response are missing between others.
        """
        if self._steps:
            values = iter(torch.cat([entropy for _, _, entropy in self._steps]).tolist())  # one copy to the host
            for numbers, positions, _ in self._steps:
                for number, position in zip(numbers, positions, strict=True):
                    self._store(number, position, next(values))
            self._steps.clear()
        return {response: self._values.pop(response, []) for response in responses}

    def _store(self, response: int, position: int, value: float) -> None:
        if position == 0:
            self._values[response] = [value]
        elif response in self._values:  # otherwise it was taken already: vLLM ran a step past a stop
            column = self._values[response]
            if position > len(column):
                raise RolloutError(
                    f"vLLM's request {response}: an entropy of token {position} after those of {len(column)} tokens; "
                    f"use rollout.entropy_source='actor'"
                )
            del column[position:]
            column.append(value)
