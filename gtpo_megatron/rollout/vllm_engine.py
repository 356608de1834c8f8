"""vLLM as the sampler, in this process."""

import logging
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gtpo_megatron.batch import RolloutBatch
from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.config.environment import EnvironmentConfig
from gtpo_megatron.config.problems import DataConfig
from gtpo_megatron.config.rollout import RolloutConfig, SamplingConfig
from gtpo_megatron.data.chat_template import load_tokenizer, stop_token_ids
from gtpo_megatron.errors import RolloutError, WeightSyncError
from gtpo_megatron.observability.memory import return_free_memory
from gtpo_megatron.rollout.cache_size import STATE_DTYPE, log_cpu_cache
from gtpo_megatron.rollout.conversation import Conversation
from gtpo_megatron.rollout.in_flight import Episode, InFlight
from gtpo_megatron.rollout.requests import ADAPTER_NUMBER, REQUEST_KEY, SampleRequest
from gtpo_megatron.rollout.response_stream import SampledResponse, stream_responses
from gtpo_megatron.rollout.responses import returned_routing, to_rollout_batch
from gtpo_megatron.weights.architecture import read_architecture
from gtpo_megatron.weights.megatron.checkpoint_files import converted_weights
from gtpo_megatron.weights.push.link import SharedSlots, SlotShape, WeightLink
from gtpo_megatron.weights.push.transports.shared_memory import create_slots, remove_name

logger = logging.getLogger(__name__)

ENTROPY_PROCESSOR = "gtpo_megatron.rollout.sampled_entropy:SampledEntropy"
"""Name of the logits processor for vLLM's first model runner, the only one on a CPU."""

GPU_ENTROPY_PROCESSOR = f"{ENTROPY_PROCESSOR}OfSlots"
"""Name of the one for its second model runner; ``engine_environment`` asks for that on a GPU."""

MIN_BATCHED_TOKENS = 8192
"""Least number of tokens per pass of vLLM: small passes waste time."""

LEAST_FREE_SHARE = 0.05
"""Fraction of a shared GPU's memory that must be free for vLLM to start (``gpu_memory_utilization``); small, because
the trainer may use the rest when an engine is replaced. The cache's size is set separately."""

ALL_MEMORY = frozenset({"weights", "kv_cache"})
"""vLLM's tags of the memory that a sleeping engine releases."""

NO_ENVIRONMENT = EnvironmentConfig()
NO_ADAPTER = AdapterConfig()

UNUSABLE = -1
"""Policy version of an engine after a failed push."""


class VllmEngine:
    """One vLLM engine, whose weights can be replaced.

    Args:
        model_path: folder in Hugging Face format, whose weights are used until the first push; or a converted folder,
            with which nothing can be sampled before the first push.
        config: settings of the engine.
        max_sequence_tokens: maximum length of prompt plus response.
        seed: vLLM's own seed; each response has its own.
        num_threads: of this process, on a CPU; 0: as they are.
        environment: answers the policy's turns; one without a name: a response is one turn.
        data: how prompts are rendered, for an environment.
        awaits_push: nothing is sampled before the first push, so that no weights are read from the folder: of 64 GPUs
            each engine would read the whole model to throw it away.
        adapter: of the run; if adapters travel alone, the folder's weights are read and stay.
        in_rounds: no conversation goes on before all have been answered, so that they repeat bit for bit; with
            ``config.is_continuous`` none waits in any case.
    """

    def __init__(  # noqa: PLR0913 - each is another part of a run's configuration
        self,
        model_path: str,
        config: RolloutConfig,
        *,
        max_sequence_tokens: int,
        seed: int,
        num_threads: int = 0,
        environment: EnvironmentConfig = NO_ENVIRONMENT,
        data: DataConfig | None = None,
        awaits_push: bool = False,
        adapter: AdapterConfig = NO_ADAPTER,
        in_rounds: bool = True,
    ) -> None:
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        from gtpo_megatron.rollout import vllm_worker, weight_engine

        self._keeps_entropies = config.entropy_source == "rollout"
        self._returns_routing = config.returns_routing
        architecture = read_architecture(Path(model_path))
        self._experts = architecture.experts
        if torch.cuda.is_available():
            cache_mib = config.gpu_cache_mib
        else:
            cache_mib = log_cpu_cache(config, architecture, max_tokens=max_sequence_tokens)
        captures_routing = config.returns_routing and not torch.cuda.is_available()
        reads_weights = adapter.pushes_alone or not awaits_push
        has_weights = reads_weights and converted_weights(Path(model_path)) is None
        entropy_processor = GPU_ENTROPY_PROCESSOR if torch.cuda.is_available() else ENTROPY_PROCESSOR
        shares_gpu = config.placement == "colocated" and torch.cuda.is_available()
        if num_threads and not torch.cuda.is_available():
            torch.set_num_threads(num_threads)  # vLLM's worker, which is built now, forbids it
        self._llm = LLM(
            model=model_path,
            # the hub's folders of Mistral have files in its own format besides, which vLLM would prefer
            load_format="hf" if has_weights else "dummy",
            config_format="hf",
            tokenizer_mode="hf",
            use_tqdm_on_load=False,
            dtype=config.dtype,
            # vLLM allows no more than max_position_embeddings, which files with YaRN may leave as it was, unless this
            # field does; what the model can do is checked before any process starts
            hf_overrides={"head_dtype": config.head_dtype, "model_max_length": max_sequence_tokens},
            tensor_parallel_size=config.tensor_parallel_size,
            enable_expert_parallel=config.expert_parallel,
            max_model_len=max_sequence_tokens,
            max_num_seqs=config.max_concurrent_sequences,
            kv_cache_memory_bytes=cache_mib << 20,
            max_num_batched_tokens=max(MIN_BATCHED_TOKENS, max_sequence_tokens),
            # with chunked prefill vLLM rewinds a request's generator, which CPU generators do not support
            enable_chunked_prefill=torch.cuda.is_available(),
            enforce_eager=not torch.cuda.is_available(),
            # a delta net's state stands for all tokens before: vLLM could keep some, at ends of large blocks, and on a
            # CPU, without chunked prefill, none
            enable_prefix_caching=not captures_routing and architecture.delta is None,
            mamba_ssm_cache_dtype=STATE_DTYPE,
            # groups are begun one by one: those that were drawn earlier are served first
            scheduling_policy="priority" if config.is_continuous else "fcfs",
            generation_config="vllm",  # the folder's generation_config must not change the sampling distribution
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            enable_sleep_mode=shares_gpu,
            **({"gpu_memory_utilization": LEAST_FREE_SHARE} if shares_gpu else {}),
            enable_return_routed_experts=config.returns_routing and not captures_routing,
            seed=seed,
            logits_processors=[entropy_processor] if self._keeps_entropies else None,
            worker_extension_cls=f"{vllm_worker.__name__}.{vllm_worker.WorkerExtension.__name__}",
            **(_lora_options(adapter) if adapter.pushes_alone else {}),
            weight_transfer_config=WeightTransferConfig(backend=weight_engine.BACKEND),
        )
        self._llm.collective_rpc("gtpo_leave_group")
        if captures_routing:
            self._llm.collective_rpc("gtpo_capture_routing")
        self._captures_routing = captures_routing
        self._max_concurrent = config.max_concurrent_sequences
        self._max_staleness = config.max_staleness
        self._keeps_requests = config.partial
        self.has_environment = bool(environment.name)
        self._max_turn_tokens = environment.max_turn_tokens or max_sequence_tokens
        self._conversation: Conversation | None = None
        self._stop_ids = _stop_token_ids(model_path)
        if self.has_environment:
            assert data is not None, "an environment's prompts are rendered as the data's"
            tokenizer, stop_ids = load_tokenizer(model_path), self._stops_of(config.sampling)
            self._conversation = Conversation(
                environment, data, tokenizer, stop_ids=stop_ids, in_rounds=in_rounds and not config.is_continuous
            )
        self._in_flight = InFlight(self._llm.llm_engine, self._conversation)
        self._vocab_size = self._llm.model_config.get_vocab_size()
        self._next_response = 0
        self._version = UNUSABLE
        self._adapter = adapter
        self._with_entropies: set[Hashable] = set()
        self._lora: Any = None
        if adapter.pushes_alone:
            from vllm.lora.request import LoRARequest

            # the tensors come by pushes; the path is for vLLM's own way
            self._lora = LoRARequest("policy", ADAPTER_NUMBER, "unused")
        elif has_weights:
            self._label(0)
        self._executor = self._llm.llm_engine.engine_core.engine_core.model_executor
        self.num_workers = config.tensor_parallel_size
        self._slots: dict[int, SharedSlots] = {}
        self._asleep: set[str] = set()

    def generate(self, requests: Sequence[SampleRequest], sampling: SamplingConfig, *, seed: int) -> RolloutBatch:
        """Samples one response per request; the token or string that ends it is part of the response.

        The same arguments and weights give the same responses: the seed of each depends on ``seed``, its group id and
        its number in the group only.

        Raises:
            RolloutError: vLLM returned no tokens, no log-probs or no entropies for a response, or the engine has no
                usable weights.
        """
        ticket = self.begin(requests, sampling, seed=seed)
        self.advance(limit_s=math.inf)
        return self.take(ticket)

    def begin(
        self,
        requests: Sequence[SampleRequest],
        sampling: SamplingConfig,
        *,
        seed: int,
        priority: int = 0,
        ticket: Hashable = None,
    ) -> Hashable:
        """Adds requests to vLLM; ``advance`` processes them.

        Args:
            requests: one response each.
            sampling: the distribution.
            seed: of the run.
            priority: with ``rollout.is_continuous``, requests with the lowest number are served first.
            ticket: of these requests; None: a number.

        Returns:
            The ticket of these requests.

        Raises:
            RolloutError: the engine has no usable weights.
        """
        self._check_weights()
        # at temperature 0 there is no distribution, and vLLM's first runner asks no processor: only evaluations have it
        has_entropies = self._keeps_entropies and sampling.temperature > 0

        def add_turn(request: SampleRequest, tokens: Sequence[int], turn: int, num_sampled: int) -> int:
            left = min(sampling.max_response_tokens - num_sampled, self._max_turn_tokens)
            return self._add(
                tokens, replace(sampling, max_response_tokens=left), request.seed(seed, turn), priority=priority
            )

        ticket = self._in_flight.begin(
            requests,
            add_turn,
            version=self._version,
            limit=sampling.max_response_tokens,
            stop_ids=self._stops_of(sampling),
            ticket=ticket,
        )
        if has_entropies:
            self._with_entropies.add(ticket)
        return ticket

    def advance(self, *, limit_s: float) -> list[Hashable]:
        """Processes all requests in flight, until all have ended or the time is up.

        With ``rollout.partial`` new weights may arrive between two calls. Requests in flight then continue with them:
        their keys and values are recomputed, their next tokens are of the new weights, and each log-prob is of the
        weights that sampled the token (``RolloutBatch.token_versions``).

        Args:
            limit_s: seconds after which no further step of vLLM is started.

        Returns:
            Tickets whose responses are complete.

        Raises:
            RolloutError: vLLM lost requests, or the engine has no usable weights.
        """
        self._check_weights()
        tickets = self._in_flight.advance(limit_s=limit_s)
        if not torch.cuda.is_available() and not self._llm.llm_engine.has_unfinished_requests():
            return_free_memory()  # the trainer needs it next
        return tickets

    def take(self, ticket: Hashable) -> RolloutBatch:
        """Removes and returns complete responses, in the order of their requests.

        Raises:
            RolloutError: as ``generate``.
        """
        episodes = self._in_flight.take(ticket)
        has_entropies = ticket in self._with_entropies
        self._with_entropies.discard(ticket)
        return to_rollout_batch(
            episodes,
            version=self._version,
            entropies=self._take_entropies(episodes) if has_entropies else None,
            routing=self._take_routing(episodes) if self._returns_routing else None,
        )

    def abort(self, ticket: Hashable) -> None:
        """Ends requests; what they have is forgotten."""
        numbers = self._in_flight.abort(ticket)
        self._with_entropies.discard(ticket)
        if self._keeps_entropies or self._captures_routing:
            self._llm.collective_rpc("gtpo_forget", args=(numbers,))

    def stream(
        self, requests: Sequence[SampleRequest], sampling: SamplingConfig, *, seed: int
    ) -> Iterator[SampledResponse]:
        """Yields responses in the order in which they end, without log-probs; see ``rollout/response_stream.py``.

        Closing the iterator aborts the remaining requests.

        Raises:
            RolloutError: vLLM ended a request without a token, or the engine has no usable weights.
        """
        self._check_weights()

        def add(request: SampleRequest) -> int:
            return self._add(request.prompt_ids, sampling, request.seed(seed), with_logprobs=False)

        return stream_responses(self._llm.llm_engine, add, requests, max_concurrent=self._max_concurrent)

    def _stops_of(self, sampling: SamplingConfig) -> list[int]:
        """The tokens that end a turn."""
        return [*self._stop_ids, *sampling.stop_token_ids]

    def _check_weights(self) -> None:
        if self._version == UNUSABLE:
            raise RolloutError(
                "vLLM has no usable weights: nothing was pushed into an engine that waits for a push, or the last "
                "push failed half-way"
            )

    def _add(
        self,
        tokens: Sequence[int],
        sampling: SamplingConfig,
        seed: int,
        *,
        with_logprobs: bool = True,
        priority: int = 0,
    ) -> int:
        """Adds a request to go on after these tokens to vLLM; returns vLLM's number of it."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        keeps_more = self._keeps_entropies or self._captures_routing
        number = self._next_response
        self._next_response += 1
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_response_tokens,
            stop=list(sampling.stop_strings),
            stop_token_ids=self._stops_of(sampling),
            logprobs=0 if with_logprobs else None,
            flat_logprobs=with_logprobs,
            seed=seed,
            detokenize=bool(sampling.stop_strings),  # needed to find stop strings
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={REQUEST_KEY: number} if keeps_more and with_logprobs else None,
        )
        self._llm.llm_engine.add_request(
            str(number),
            # no request finds keys and values of other weights, also if the cache was not emptied
            tokens_input(list(tokens), cache_salt=str(self._version)),
            params,
            lora_request=self._lora,
            priority=priority,
        )
        return number

    def _take_entropies(self, episodes: Sequence[Episode]) -> dict[int, list[float]]:
        numbers = [turn.number for episode in episodes for turn in episode.turns]
        taken, vocab_size = self._llm.collective_rpc("gtpo_take_entropies", args=(numbers,))[0]
        if vocab_size != self._vocab_size:
            raise RolloutError(
                f"vLLM sampled from {vocab_size} columns, the model's config.json says vocab_size={self._vocab_size}; "
                f"entropies would be of another distribution than the trainer's: use entropy_source='actor'"
            )
        return {number: taken[number] for number in numbers}

    def _take_routing(self, episodes: Sequence[Episode]) -> list[Tensor]:
        """Per response of one turn the experts of the tokens that were run, ``[n, M, k]``."""
        last = [episode.turns[-1] for episode in episodes]
        num_tokens = [len(episode.token_ids) - 1 for episode in episodes]
        if self._captures_routing:
            numbers = [turn.number for turn in last]
            taken: list[Tensor] = self._llm.collective_rpc("gtpo_take_routing", args=(numbers, num_tokens))[0]
            return taken
        assert self._experts is not None, "check_sampler refuses routing of a dense model"
        return [
            returned_routing(episode.request, turn.completion, count, experts=self._experts)
            for episode, turn, count in zip(episodes, last, num_tokens, strict=True)
        ]

    def open_slots(self, workers: Sequence[int], shape: SlotShape) -> dict[int, SharedSlots]:
        """Opens shared memory for this engine's workers, by their indices in the link."""
        for worker in workers:
            self._slots[worker] = create_slots(shape)
        return dict(self._slots)

    def remove_slot_names(self) -> None:
        """Removes the slots' names, after all processes have mapped them."""
        for slots in self._slots.values():
            remove_name(slots)
        self._slots.clear()

    def connect_weights(self, link: WeightLink, workers: Sequence[int]) -> None:
        """Opens the link in every worker.

        Args:
            link: the link to the trainer.
            workers: indices of this engine's workers in it.
        """
        self._llm.collective_rpc(
            "init_weight_transfer_engine", kwargs={"init_info": {"link": link, "workers": list(workers)}}
        )

    def receive_weights(self, version: int, *, with_checksums: bool) -> dict[int, dict[str, int]]:
        """Receives and loads weights from the trainer, and empties the prefix cache.

        Returns:
            By worker the checksum of every tensor that it received; empty without ``with_checksums``.

        Raises:
            WeightSyncError: the weights did not arrive, or vLLM could not load them; the engine is then unusable and
                must be replaced. Or requests in flight would become too stale; then nothing changes.
        """
        self._in_flight.check_push(version, max_staleness=self._max_staleness)
        self._version = UNUSABLE
        try:
            self._take_push(version, with_checksums=with_checksums)
        except Exception as error:
            raise WeightSyncError(f"vLLM could not load policy version {version}: {error}") from error
        versions = self._llm.collective_rpc("gtpo_policy_version")
        if set(versions) != {version}:
            raise WeightSyncError(f"vLLM workers report policy versions {versions} after a push of {version}")
        # requests in flight recompute their keys and values with the new weights
        self._forget_prefixes(with_running=self._keeps_requests)
        self._label(version)
        return dict(self._llm.collective_rpc("gtpo_received_checksums")) if with_checksums else {}

    def _take_push(self, version: int, *, with_checksums: bool) -> None:
        if self._lora is not None:
            self._llm.collective_rpc("gtpo_receive_adapters", args=(version, with_checksums, self._adapter))
            return
        self._llm.collective_rpc("start_weight_update")
        push = {"version": version, "with_checksums": with_checksums}
        self._llm.collective_rpc("update_weights", kwargs={"update_info": push})
        self._llm.collective_rpc("finish_weight_update")

    def forget_prefixes(self) -> None:
        """Empties the prefix cache, so that the next generation does not depend on earlier ones."""
        self._forget_prefixes(with_running=False)

    def _label(self, version: int) -> None:
        """Labels further tokens with this policy version."""
        self._llm.llm_engine.set_weight_version(str(version))
        self._version = version

    def _forget_prefixes(self, *, with_running: bool) -> None:
        if not self._llm.reset_prefix_cache(reset_running_requests=with_running):
            raise WeightSyncError("vLLM refused to reset its prefix cache: requests are still running")

    def close(self) -> None:
        """Ends the workers and frees their shared memory; the engine cannot be used afterwards."""
        if self._conversation is not None:
            self._conversation.close()
        self._llm.llm_engine.engine_core.shutdown()

    def on_worker_death(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` in another thread when a worker process has died; with one worker there is none."""
        self._executor.register_failure_callback(callback)

    def has_lost_worker(self) -> bool:
        """Whether a worker process has died, so that the engine cannot sample."""
        return any(not worker.proc.is_alive() for worker in getattr(self._executor, "workers", ()))

    def sleep(self, *, keep_weights: bool) -> None:
        """Releases GPU memory: keys and values are dropped, weights move to the host or are dropped.

        Frozen weights are never dropped: no push brings them back.
        """
        if not torch.cuda.is_available():
            logger.info("the engine does not sleep: there is no GPU to share")
            return
        if self._asleep == ALL_MEMORY:
            return  # as after the start
        self._llm.sleep(level=1 if keep_weights or self._lora is not None else 2)
        self._asleep = set(ALL_MEMORY)

    def wake(self, what: str) -> None:
        """Allocates GPU memory for weights or keys and values again, if the engine sleeps."""
        if what in self._asleep:
            self._llm.wake_up(tags=[what])
            self._asleep.discard(what)


def _lora_options(adapter: AdapterConfig) -> dict[str, Any]:
    """With which vLLM is started where adapters travel alone; without targets it would wrap experts too."""
    return {
        "enable_lora": True,
        "max_lora_rank": adapter.sampler_rank,
        "lora_target_modules": list(adapter.targets),
    }


def _stop_token_ids(model_path: str) -> list[int]:
    """The tokens that end a response; not by vLLM's tokenizer, which converts a sentencepiece model to another one."""
    found = stop_token_ids(Path(model_path), load_tokenizer(model_path))
    if not found:
        raise RolloutError("the model folder declares no eos_token_id; responses would all run to the length limit")
    return found
