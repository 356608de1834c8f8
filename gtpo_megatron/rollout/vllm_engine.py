"""vLLM as the sampler, in this process."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from gtpo_megatron.batch import PromptBatch, RolloutBatch
from gtpo_megatron.config.rollout import RolloutConfig, SamplingConfig
from gtpo_megatron.errors import RolloutError, WeightSyncError
from gtpo_megatron.weights.hf_buffer import BufferLayout

logger = logging.getLogger(__name__)


MIN_BATCHED_TOKENS = 8192
"""Tokens that vLLM computes in one pass, at least: a whole prompt must fit, and small passes waste time."""


def sample_seed(seed: int, group_id: int, sample: int) -> int:
    """The random seed of one response, in ``[0, 2^63)``: a hash of what identifies it, whichever engine serves it."""
    digest = hashlib.blake2b(f"{seed}:{group_id}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class VllmEngine:
    """One vLLM engine, a sampler with weights that can be replaced.

    Args:
        model_path: folder in Hugging Face format; its weights are used until the first push.
        config: of the engine.
        max_sequence_tokens: prompt plus response.
        seed: of vLLM itself; responses have seeds of their own.
        num_threads: on a CPU; 0 leaves it to vLLM.
    """

    def __init__(
        self, model_path: str, config: RolloutConfig, *, max_sequence_tokens: int, seed: int, num_threads: int = 0
    ) -> None:
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        from gtpo_megatron.rollout import vllm_worker

        self._llm = LLM(
            model=model_path,
            dtype=config.dtype,
            tensor_parallel_size=config.tensor_parallel_size,
            max_model_len=max_sequence_tokens,
            max_num_seqs=config.max_concurrent_sequences,
            kv_cache_memory_bytes=config.kv_cache_mib << 20,
            max_num_batched_tokens=max(MIN_BATCHED_TOKENS, max_sequence_tokens),
            # a prompt cut in two makes vLLM turn a request's own generator back, which CPU generators cannot
            enable_chunked_prefill=torch.cuda.is_available(),
            enforce_eager=not torch.cuda.is_available(),
            enable_prefix_caching=True,
            generation_config="vllm",  # the folder's generation_config must not change the sampling distribution
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            seed=seed,
            worker_extension_cls=f"{vllm_worker.__name__}.{vllm_worker.WorkerExtension.__name__}",
            weight_transfer_config=WeightTransferConfig(backend=vllm_worker.BACKEND),
        )
        if num_threads and not torch.cuda.is_available():
            self._llm.collective_rpc("gtpo_set_threads", args=(num_threads,))
        self._stop_ids = _stop_token_ids(self._llm)
        self._version = 0

    def generate(
        self, prompts: PromptBatch, sampling: SamplingConfig, *, samples_per_prompt: int, seed: int
    ) -> RolloutBatch:
        """Samples ``samples_per_prompt`` responses a prompt; the end-of-turn token is part of the response.

        Rows are prompt-major: all samples of prompt 0, then of prompt 1, ... The same arguments and weights give the
        same responses: sample ``j`` of a prompt has a seed made of ``seed``, the prompt's group id and ``j`` alone.

        Raises:
            RolloutError: vLLM returned no tokens or no log-probs for a response.
        """
        from vllm import SamplingParams

        requests, params = [], []
        for problem, group_id in zip(prompts.problems, prompts.group_ids, strict=True):
            for sample in range(samples_per_prompt):
                requests.append({"prompt_token_ids": list(problem.prompt_ids)})
                params.append(
                    SamplingParams(
                        temperature=sampling.temperature,
                        top_p=sampling.top_p,
                        top_k=sampling.top_k,
                        max_tokens=sampling.max_response_tokens,
                        stop_token_ids=self._stop_ids,
                        logprobs=0,
                        seed=sample_seed(seed, group_id, sample),
                        detokenize=False,
                    )
                )
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        group_ids = [g for g in prompts.group_ids for _ in range(samples_per_prompt)]
        return self._to_batch([output.prompt_token_ids for output in outputs], outputs, group_ids)

    def _to_batch(self, prompt_ids: Sequence[list[int]], outputs: Sequence[Any], group_ids: list[int]) -> RolloutBatch:
        responses = [output.outputs[0] for output in outputs]
        logprobs = []
        for row, response in enumerate(responses):
            ids = list(response.token_ids)
            if not ids or response.logprobs is None or len(response.logprobs) != len(ids):
                raise RolloutError(
                    f"response {row} of group {group_ids[row]}: {len(ids)} tokens, finish reason "
                    f"{response.finish_reason!r}, log-probs {'missing' if response.logprobs is None else 'short'}"
                )
            logprobs.append([entry[token].logprob for token, entry in zip(ids, response.logprobs, strict=True)])
        return RolloutBatch(
            prompt_ids=_pad([list(ids) for ids in prompt_ids], torch.int64),
            prompt_lengths=torch.tensor([len(ids) for ids in prompt_ids]),
            response_ids=_pad([list(response.token_ids) for response in responses], torch.int64),
            response_lengths=torch.tensor([len(response.token_ids) for response in responses]),
            rollout_logprobs=_pad(logprobs, torch.float32),
            group_ids=torch.tensor(group_ids),
            truncated=torch.tensor([response.finish_reason == "length" for response in responses]),
            policy_version=self._version,
        )

    def connect_weights(self, layout: BufferLayout) -> None:
        """Every worker maps the buffer."""
        self._llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": asdict(layout)})

    def load_weights(self, version: int) -> None:
        """Loads the buffer into every worker and drops the prefix cache, whose keys and values are of the old weights.

        Raises:
            WeightSyncError: vLLM could not load them; the engine must not be used any more.
        """
        try:
            self._llm.collective_rpc("start_weight_update")
            self._llm.collective_rpc("update_weights", kwargs={"update_info": {"version": version}})
            self._llm.collective_rpc("finish_weight_update")
        except Exception as error:
            raise WeightSyncError(f"vLLM could not load policy version {version}: {error}") from error
        versions = self._llm.collective_rpc("gtpo_policy_version")
        if set(versions) != {version}:
            raise WeightSyncError(f"vLLM workers report policy versions {versions} after a push of {version}")
        self._version = version
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """Empties the prefix cache, so that what was generated before cannot influence what comes next."""
        if not self._llm.reset_prefix_cache():
            raise WeightSyncError("vLLM refused to reset its prefix cache: requests are still running")

    def received_checksums(self) -> list[dict[str, int]]:
        """Checksum of every tensor of the last push, one dictionary a worker."""
        checksums: list[dict[str, int]] = self._llm.collective_rpc("gtpo_received_checksums")
        return checksums


def _stop_token_ids(llm: Any) -> list[int]:
    """The tokenizer's end of turn, and what the folder's generation_config adds to it."""
    ids = {llm.get_tokenizer().eos_token_id}
    declared = llm.model_config.try_get_generation_config().get("eos_token_id")
    ids |= set(declared) if isinstance(declared, list) else {declared}
    found = sorted(token for token in ids if token is not None)
    if not found:
        raise RolloutError("the model folder declares no eos_token_id; responses would all run to the length limit")
    return found


def _pad(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
    width = max((len(row) for row in rows), default=0)
    out = torch.zeros(len(rows), width, dtype=dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row, dtype=dtype)
    return out
