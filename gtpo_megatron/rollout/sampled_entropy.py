"""Entropy of every sampled token, computed inside vLLM during sampling.

A logits processor of vLLM that only reads the logits. It sees those of the whole vocabulary (gathered over
tensor-parallel workers) before top-k and top-p, so it scores the full sampling distribution. vLLM 0.32 has two model
runners with an interface each: CPUs have the first one, GPUs the second.
"""

from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.logits_processor.interface import LogitsProcessor as FirstInterface
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SecondInterface

from gtpo_megatron.distributed.vocab_parallel import token_scores
from gtpo_megatron.rollout.entropy_log import EntropyLog
from gtpo_megatron.rollout.requests import REQUEST_KEY


class SampledEntropy(FirstInterface):
    """``H = -sum_v p_v log p_v`` in nats, float32, for the first model runner.

    Attributes:
        log: where entropies are kept.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        del vllm_config, device, is_pin_memory  # vLLM's signature
        self._tracked: dict[int, tuple[int, list[int]]] = {}
        self.log = EntropyLog()

    def is_argmax_invariant(self) -> bool:
        """True: the logits are not changed. This also places it after the temperature."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Tracks requests that vLLM adds, removes and moves in its batch."""
        process_dict_updates(self._tracked, batch_update, _response_and_tokens)

    def apply(self, logits: Tensor) -> Tensor:
        """Scores the rows whose entropies are needed.

        Args:
            logits: ``[requests, V]`` float32, divided by the temperature.

        Returns:
            The same logits.
        """
        rows = sorted(self._tracked)
        tracked = [self._tracked[row] for row in rows]
        positions = [len(output_ids) for _, output_ids in tracked]
        _note(self.log, logits, rows, [response for response, _ in tracked], positions, 1.0)
        return logits


class SampledEntropyOfSlots(SecondInterface):
    """The same for the second model runner, which names requests by slots and applies the temperature afterwards.

    Attributes:
        log: where entropies are kept.
    """

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        del vllm_config  # vLLM's signature
        self._states = req_states
        # slot -> response, temperature; slots are used again
        self._tracked: dict[int, tuple[int, float]] = {}
        self.log = EntropyLog()

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Tracks the request of a slot; True if its logits are wanted, without which ``apply`` is not called."""
        response = _response_of(sampling_params)
        if response is None:
            self._tracked.pop(req_idx, None)
            return False
        self._tracked[req_idx] = (response, sampling_params.temperature)
        return True

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """Scores the rows whose entropies are needed.

        Args:
            logits: ``[requests, V]`` float32, before the temperature; one row a request, without speculative decoding.
            ctx: which slot a row is of, and how many of its tokens the model has seen.

        Returns:
            The same logits.
        """
        rows, responses, positions, temperatures = [], [], [], []
        for row, slot in enumerate(ctx.idx_mapping_np.tolist()):
            num_seen = int(ctx.seq_lens_upper_bound_np[row])
            # before that the model has not seen all that the slot was filled with (the prompt; after a preemption the
            # tokens sampled so far too), and vLLM throws away what is sampled
            if slot in self._tracked and num_seen >= self._states.prefill_len.np[slot]:
                response, temperature = self._tracked[slot]
                rows.append(row)
                responses.append(response)
                positions.append(num_seen - int(self._states.prompt_len.np[slot]))
                temperatures.append(temperature)
        is_one = len(set(temperatures)) < 2
        temperature = temperatures[0] if is_one and temperatures else 1.0
        _note(
            self.log,
            logits,
            rows,
            responses,
            positions,
            temperature if is_one else torch.tensor(temperatures).to(logits.device, non_blocking=True),
        )
        return logits


def _note(
    log: EntropyLog,
    logits: Tensor,
    rows: list[int],
    responses: list[int],
    positions: list[int],
    temperature: float | Tensor,
) -> None:
    """Scores some rows; nothing waits for the device."""
    if not rows:
        return
    wanted = logits
    if len(rows) < len(logits):
        wanted = logits.index_select(0, torch.tensor(rows).to(logits.device, non_blocking=True))
    targets = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)  # only the entropy is used
    entropy = token_scores(wanted, targets, temperature=temperature, check_inputs=False).entropy
    log.vocab_size = logits.shape[1]
    log.note(responses, positions, entropy)


def _response_of(params: SamplingParams) -> int | None:
    """The response that a request samples, if its entropies are wanted: there are none at temperature 0."""
    return (params.extra_args or {}).get(REQUEST_KEY) if params.temperature > 0 else None


def _response_and_tokens(
    params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
) -> tuple[int, list[int]] | None:
    del prompt_ids
    response = _response_of(params)
    return None if response is None else (response, output_ids)
