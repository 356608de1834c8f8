"""Entropy of every sampled token, computed inside vLLM during sampling.

It is a logits processor of vLLM that only reads the logits. It runs after the temperature and before top-k and top-p,
on logits of the whole vocabulary (gathered over tensor-parallel workers), so it scores the full sampling distribution.
Values are kept by response and position until ``WorkerExtension.gtpo_take_entropies`` collects them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor

from gtpo_megatron.distributed.vocab_parallel import token_scores
from gtpo_megatron.rollout.requests import REQUEST_KEY


class SampledEntropy(LogitsProcessor):
    """Computes ``H = -sum_v p_v log p_v`` in nats, in float32 relative to the largest logit.

    A value is stored by response and position (the number of tokens that the response has before the sampled one).
    Values that vLLM computes again after a preemption, or discards for an incomplete prompt, are replaced.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        del vllm_config, device, is_pin_memory  # vLLM's signature
        self._tracked: dict[int, tuple[int, list[int]]] = {}
        self._log: list[tuple[list[int], list[int], Tensor]] = []
        self._values: dict[int, list[float]] = {}
        self.vocab_size = 0

    def is_argmax_invariant(self) -> bool:
        """True: the logits are not changed. This also places it after the temperature."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Tracks requests that vLLM adds, removes and moves in its batch."""
        process_dict_updates(self._tracked, batch_update, _response_of)

    def apply(self, logits: Tensor) -> Tensor:
        """Scores the rows whose entropies are needed.

        Args:
            logits: ``[requests, V]`` float32, divided by the temperature.

        Returns:
            The same logits.
        """
        if not self._tracked:
            return logits
        rows = sorted(self._tracked)
        responses, positions = [], []
        for row in rows:
            response, output_ids = self._tracked[row]
            responses.append(response)
            positions.append(len(output_ids))
        wanted = logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=logits.device)]
        targets = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)  # only the entropy is used
        entropy = token_scores(wanted, targets).entropy
        self.vocab_size = logits.shape[1]
        # nothing is copied to the host while vLLM generates
        self._log.append((responses, positions, entropy))
        return logits

    def take(self, responses: Sequence[int]) -> dict[int, list[float]]:
        """Removes and returns the entropies of finished responses, one per sampled token.

        The last value may belong to a token after a stop that vLLM did not return; callers must cut it.
        """
        self._store_log()
        return {response: self._values.pop(response, []) for response in responses}

    def _store_log(self) -> None:
        """Stores the logged values by response and position."""
        if not self._log:
            return
        flat = torch.cat([entropy for _, _, entropy in self._log]).tolist()
        start = 0
        for responses, positions, entropy in self._log:
            for response, position, value in zip(responses, positions, flat[start : start + len(entropy)], strict=True):
                if position == 0:
                    self._values[response] = [value]
                elif response in self._values:  # otherwise it was taken already: vLLM ran a step past a stop
                    column = self._values[response]
                    del column[position:]
                    column.append(value)
            start += len(entropy)
        self._log.clear()


def _response_of(
    params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
) -> tuple[int, list[int]] | None:
    del prompt_ids
    response = (params.extra_args or {}).get(REQUEST_KEY)
    return None if response is None else (response, output_ids)
