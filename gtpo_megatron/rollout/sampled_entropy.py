"""Entropy of every sampled token, computed inside vLLM while it samples.

A logits processor is vLLM's own extension point for code that sees the logits; ours reads them and changes nothing. It
runs after the temperature and before top-k and top-p (both only cut), on logits of the whole vocabulary (gathered over
tensor-parallel workers), so what it scores is the full sampling distribution. vLLM returns nothing of a processor's:
values wait here, by response and position, until ``WorkerExtension.gtpo_take_entropies`` collects them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor

from gtpo_megatron.distributed.vocab_parallel import token_scores

REQUEST_KEY = "gtpo_response"
"""In ``SamplingParams.extra_args``: the number of the response whose entropies are wanted; absent: none are."""


class SampledEntropy(LogitsProcessor):
    """Keeps ``H = -sum_v p_v log p_v`` in nats, float32 maths relative to the largest logit.

    A value belongs to a response and a position, and the position is the number of tokens that the response has when
    its next one is sampled. So neither the order of the batch, nor what was preempted and computed again, nor a
    sample that vLLM throws away (of a prompt that is not yet read to its end) can put a value in a wrong place: what
    is computed again replaces what was there.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        del vllm_config, device, is_pin_memory  # the signature is vLLM's
        self._tracked: dict[int, tuple[int, list[int]]] = {}
        self._log: list[tuple[list[int], list[int], Tensor]] = []
        self._values: dict[int, list[float]] = {}
        self.vocab_size = 0

    def is_argmax_invariant(self) -> bool:
        """True: the logits stay as they are. Also what places it behind the temperature."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows requests as vLLM adds, removes and moves them in its batch."""
        process_dict_updates(self._tracked, batch_update, _response_of)

    def apply(self, logits: Tensor) -> Tensor:
        """Scores the rows whose entropies are wanted.

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
        # one row a response, where it stands; nothing is copied to the host while vLLM generates
        self._log.append((responses, positions, entropy))
        return logits

    def take(self, responses: Sequence[int]) -> dict[int, list[float]]:
        """The entropies of finished responses, one a sampled token; they are forgotten here.

        The last value may be of a token that vLLM sampled and did not return (past a stop): callers cut.
        """
        self._settle()
        return {response: self._values.pop(response, []) for response in responses}

    def _settle(self) -> None:
        """Puts the log's values where they belong."""
        if not self._log:
            return
        flat = torch.cat([entropy for _, _, entropy in self._log]).tolist()
        start = 0
        for responses, positions, entropy in self._log:
            for response, position, value in zip(responses, positions, flat[start : start + len(entropy)], strict=True):
                if position == 0:
                    self._values[response] = [value]
                elif response in self._values:  # else it was taken already: vLLM ran a step ahead of a stop
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
