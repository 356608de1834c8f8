"""vLLM as the sampler, in this process."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from gtpo_megatron.batch import RolloutBatch
from gtpo_megatron.config.rollout import RolloutConfig, SamplingConfig
from gtpo_megatron.data.chat_template import load_tokenizer
from gtpo_megatron.errors import RolloutError, WeightSyncError
from gtpo_megatron.rollout.in_flight import InFlight
from gtpo_megatron.rollout.requests import SampleRequest
from gtpo_megatron.rollout.response_stream import SampledResponse, stream_responses
from gtpo_megatron.rollout.responses import to_rollout_batch
from gtpo_megatron.weights.conversion import converted_weights
from gtpo_megatron.weights.push.link import WeightLink
from gtpo_megatron.weights.push.transports.shared_memory import SharedSlots, SlotShape, create_slots, remove_name

logger = logging.getLogger(__name__)

ENTROPY_PROCESSOR = "gtpo_megatron.rollout.sampled_entropy:SampledEntropy"
"""As vLLM names a logits processor."""

MIN_BATCHED_TOKENS = 8192
"""Tokens that vLLM computes in one pass, at least: a whole prompt must fit, and small passes waste time."""

LEAST_FREE_SHARE = 0.05
"""Of a shared GPU's memory, without which vLLM does not start (``gpu_memory_utilization``): an engine that replaces
another one finds the trainer there. The cache has a size of its own, so the share means nothing else."""

ALL_MEMORY = frozenset({"weights", "kv_cache"})
"""vLLM's tags of what a sleeping engine lets go."""

UNUSABLE = -1
"""Policy version of an engine whose weights are neither the old nor the new ones."""


class VllmEngine:
    """One vLLM engine, a sampler with weights that can be replaced.

    Args:
        model_path: folder in Hugging Face format, whose weights are used until the first push; or a converted folder,
            whose weights vLLM cannot read, so that nothing is sampled before the first push.
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

        from gtpo_megatron.rollout import vllm_worker, weight_engine

        self._keeps_entropies = config.entropy_source == "rollout"
        has_weights = converted_weights(Path(model_path)) is None
        shares_gpu = config.placement == "colocated" and torch.cuda.is_available()
        self._llm = LLM(
            model=model_path,
            load_format="auto" if has_weights else "dummy",
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
            # two steps' requests may be in flight: what the next one waits for comes first, its refills too
            scheduling_policy="priority" if config.partial else "fcfs",
            generation_config="vllm",  # the folder's generation_config must not change the sampling distribution
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            enable_sleep_mode=shares_gpu,
            **({"gpu_memory_utilization": LEAST_FREE_SHARE} if shares_gpu else {}),
            seed=seed,
            logits_processors=[ENTROPY_PROCESSOR] if self._keeps_entropies else None,
            worker_extension_cls=f"{vllm_worker.__name__}.{vllm_worker.WorkerExtension.__name__}",
            weight_transfer_config=WeightTransferConfig(backend=weight_engine.BACKEND),
        )
        if num_threads and not torch.cuda.is_available():
            self._llm.collective_rpc("gtpo_set_threads", args=(num_threads,))
        self._max_concurrent = config.max_concurrent_sequences
        self._max_staleness = config.max_staleness
        self._keeps_requests = config.partial
        self._in_flight = InFlight(self._llm.llm_engine)
        self._stop_ids = _stop_token_ids(self._llm, model_path)
        self._vocab_size = self._llm.model_config.get_vocab_size()
        self._next_response = 0
        self._version = UNUSABLE
        if has_weights:
            self._label(0)
        self._executor = self._llm.llm_engine.engine_core.engine_core.model_executor
        self.num_workers = config.tensor_parallel_size
        self._slots: dict[int, SharedSlots] = {}
        self._asleep: set[str] = set()

    def generate(self, requests: Sequence[SampleRequest], sampling: SamplingConfig, *, seed: int) -> RolloutBatch:
        """Samples one response a request; the token or string that ends it is part of the response.

        The same arguments and weights give the same responses: each has a seed made of ``seed``, its group id and its
        number in the group alone.

        Raises:
            RolloutError: vLLM returned no tokens, no log-probs or no entropies for a response, or the engine has no
                usable weights.
        """
        ticket = self.begin(requests, sampling, seed=seed)
        batch = self.advance(ticket, limit_s=math.inf)
        assert batch is not None, "without a limit it comes back with the batch"
        return batch

    def begin(
        self, requests: Sequence[SampleRequest], sampling: SamplingConfig, *, seed: int, priority: int = 0
    ) -> int:
        """Hands requests to vLLM; ``advance`` lets it work on them.

        Args:
            requests: one response each.
            sampling: the distribution.
            seed: of the run.
            priority: with ``rollout.partial``, those with the lowest number come first, whenever they were begun.

        Returns:
            The ticket to ask for the responses with.

        Raises:
            RolloutError: the engine has no usable weights.
        """
        self._check_weights()
        return self._in_flight.add(
            requests, self._add(requests, sampling, seed, priority=priority), version=self._version
        )

    def advance(self, ticket: int, *, limit_s: float) -> RolloutBatch | None:
        """Works on everything that is in flight, for some time or until a batch is whole.

        With ``rollout.partial`` new weights may come between two calls. What is in flight then goes on with them: its
        keys and values are computed again, its next tokens are of the new weights, and its log-probs stay those of the
        weights that sampled each token (``RolloutBatch.token_versions``).

        Args:
            ticket: of the batch.
            limit_s: seconds; the step of vLLM's that is under way then is the last one.

        Returns:
            The responses, as ``generate`` does; None: they are not whole yet.

        Raises:
            RolloutError: as ``generate``.
        """
        self._check_weights()
        if not self._in_flight.advance(ticket, limit_s=limit_s):
            return None
        requests, numbers, completions = self._in_flight.take(ticket)
        return to_rollout_batch(
            requests,
            completions,
            entropies=self._take_entropies(numbers) if self._keeps_entropies else None,
        )

    def stream(
        self, requests: Sequence[SampleRequest], sampling: SamplingConfig, *, seed: int
    ) -> Iterator[SampledResponse]:
        """The same responses, in the order in which they end, without log-probs; see ``rollout/response_stream.py``.

        Raises:
            RolloutError: vLLM ended a request without a token, or the engine has no usable weights.
        """
        self._check_weights()

        def add(some: Sequence[SampleRequest]) -> int:
            return self._add(some, sampling, seed, with_logprobs=False)

        return stream_responses(self._llm.llm_engine, add, requests, max_concurrent=self._max_concurrent)

    def _check_weights(self) -> None:
        if self._version == UNUSABLE:
            raise RolloutError(
                "vLLM has no usable weights: nothing was pushed into an engine of a converted folder yet, or the last "
                "push failed half-way"
            )

    def _add(
        self,
        requests: Sequence[SampleRequest],
        sampling: SamplingConfig,
        seed: int,
        *,
        with_logprobs: bool = True,
        priority: int = 0,
    ) -> int:
        """Hands requests to vLLM, which numbers them on; returns the first number."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        from gtpo_megatron.rollout.sampled_entropy import REQUEST_KEY

        first = self._next_response
        self._next_response += len(requests)
        for number, request in enumerate(requests, first):
            params = SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_response_tokens,
                stop=list(sampling.stop_strings),
                stop_token_ids=[*self._stop_ids, *sampling.stop_token_ids],
                logprobs=0 if with_logprobs else None,
                flat_logprobs=with_logprobs,
                seed=request.seed(seed),
                detokenize=bool(sampling.stop_strings),  # only to look for them
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args={REQUEST_KEY: number} if self._keeps_entropies else None,
            )
            self._llm.llm_engine.add_request(
                str(number), tokens_input(list(request.prompt_ids)), params, priority=priority
            )
        return first

    def _take_entropies(self, numbers: Sequence[int]) -> list[list[float]]:
        taken, vocab_size = self._llm.collective_rpc("gtpo_take_entropies", args=(list(numbers),))[0]
        if vocab_size != self._vocab_size:
            raise RolloutError(
                f"vLLM sampled from {vocab_size} columns, the model's config.json says vocab_size={self._vocab_size}; "
                f"entropies would be of another distribution than the trainer's: use entropy_source='actor'"
            )
        return [taken[number] for number in numbers]

    def open_slots(self, workers: Sequence[int], shape: SlotShape) -> dict[int, SharedSlots]:
        """Shared memory on this machine for this engine's workers, by the numbers that they have in the link."""
        for worker in workers:
            self._slots[worker] = create_slots(shape)
        return dict(self._slots)

    def remove_slot_names(self) -> None:
        """All who need the slots have mapped them: their memory shall go when the last of them goes."""
        for slots in self._slots.values():
            remove_name(slots)
        self._slots.clear()

    def connect_weights(self, link: WeightLink, workers: Sequence[int]) -> None:
        """Every worker opens its end.

        Args:
            link: to the trainer.
            workers: the numbers that this engine's workers have in it.
        """
        self._llm.collective_rpc(
            "init_weight_transfer_engine", kwargs={"init_info": {"link": link, "workers": list(workers)}}
        )

    def receive_weights(self, version: int, *, with_checksums: bool) -> dict[int, dict[str, int]]:
        """Loads the weights that the trainer sends meanwhile, and drops the prefix cache, which is of the old ones.

        Returns:
            Worker -> checksum of every tensor that it received; empty without ``with_checksums``.

        Raises:
            WeightSyncError: the weights did not come, or vLLM could not load them. The engine is then unusable and must
                be replaced. Or requests are in flight that the new weights would make too old; then nothing changes.
        """
        self._in_flight.check_push(version, max_staleness=self._max_staleness)
        self._version = UNUSABLE
        try:
            self._llm.collective_rpc("start_weight_update")
            push = {"version": version, "with_checksums": with_checksums}
            self._llm.collective_rpc("update_weights", kwargs={"update_info": push})
            self._llm.collective_rpc("finish_weight_update")
        except Exception as error:
            raise WeightSyncError(f"vLLM could not load policy version {version}: {error}") from error
        versions = self._llm.collective_rpc("gtpo_policy_version")
        if set(versions) != {version}:
            raise WeightSyncError(f"vLLM workers report policy versions {versions} after a push of {version}")
        # requests in flight lose their keys and values too, which are of the old weights, and compute them again
        self._forget_prefixes(with_running=self._keeps_requests)
        self._label(version)
        return dict(self._llm.collective_rpc("gtpo_received_checksums")) if with_checksums else {}

    def forget_prefixes(self) -> None:
        """Empties the prefix cache, so that what was generated before cannot influence what comes next."""
        self._forget_prefixes(with_running=False)

    def _label(self, version: int) -> None:
        """What comes from now on is of this version of the weights."""
        self._llm.llm_engine.set_weight_version(str(version))
        self._version = version

    def _forget_prefixes(self, *, with_running: bool) -> None:
        if not self._llm.reset_prefix_cache(reset_running_requests=with_running):
            raise WeightSyncError("vLLM refused to reset its prefix cache: requests are still running")

    def close(self) -> None:
        """Ends the workers, and removes what they share from shared memory; the engine cannot be used afterwards."""
        self._llm.llm_engine.engine_core.shutdown()

    def on_worker_death(self, callback: Callable[[], None]) -> None:
        """Calls back, in another thread, when a worker process has died; with one worker there is no such process."""
        self._executor.register_failure_callback(callback)

    def has_lost_worker(self) -> bool:
        """Whether a worker process has died: nothing can be sampled any more."""
        return any(not worker.proc.is_alive() for worker in getattr(self._executor, "workers", ()))

    def sleep(self, *, keep_weights: bool) -> None:
        """Lets GPU memory go: keys and values are dropped, weights go to the host or are dropped too."""
        if not torch.cuda.is_available():
            logger.info("the engine does not sleep: there is no GPU to share")
            return
        if self._asleep == ALL_MEMORY:
            return  # as after the start, when it made room for the trainer
        self._llm.sleep(level=1 if keep_weights else 2)
        self._asleep = set(ALL_MEMORY)

    def wake(self, what: str) -> None:
        """Takes GPU memory back for weights or for keys and values, if it is asleep."""
        if what in self._asleep:
            self._llm.wake_up(tags=[what])
            self._asleep.discard(what)


def _stop_token_ids(llm: Any, model_path: str) -> list[int]:
    """The tokenizer's end of turn, and what the folder's generation_config adds to it."""
    ids = {load_tokenizer(model_path).eos_token_id}  # not vLLM's, which rebuilds a sentencepiece model as another
    declared = llm.model_config.try_get_generation_config().get("eos_token_id")
    ids |= set(declared) if isinstance(declared, list) else {declared}
    found = sorted(token for token in ids if token is not None)
    if not found:
        raise RolloutError("the model folder declares no eos_token_id; responses would all run to the length limit")
    return found
