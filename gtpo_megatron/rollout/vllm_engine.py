"""vLLM as the sampler, in this process."""

import logging
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gtpo_megatron.batch import RolloutBatch
from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.config.environment import EnvironmentConfig
from gtpo_megatron.config.problems import DataConfig
from gtpo_megatron.config.rollout import RolloutConfig, SamplingConfig
from gtpo_megatron.data.chat_template import load_tokenizer, stop_token_ids
from gtpo_megatron.errors import RolloutError
from gtpo_megatron.observability.memory import return_scarce_memory
from gtpo_megatron.rollout.cache_size import log_cpu_cache
from gtpo_megatron.rollout.engine_arguments import captures_routing, llm_arguments
from gtpo_megatron.rollout.engine_nodes import EngineNode, FollowingWorkers
from gtpo_megatron.rollout.engine_weights import EngineWeights
from gtpo_megatron.rollout.in_flight import InFlight, SampledEpisode
from gtpo_megatron.rollout.requests import REQUEST_KEY, SampleRequest
from gtpo_megatron.rollout.response_stream import SampledResponse, stream_responses
from gtpo_megatron.rollout.responses import returned_routing, to_rollout_batch
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.megatron.checkpoint_files import converted_weights

if TYPE_CHECKING:
    from gtpo_megatron.rollout.conversation import EnvironmentTurns

logger = logging.getLogger(__name__)

ALL_MEMORY = frozenset({"weights", "kv_cache"})
"""vLLM's tags of the memory that a sleeping engine releases."""

FIRST_RESPONSES = "the first responses are whole"
"""What an engine's log says once, when its start is over."""

NO_ENVIRONMENT = EnvironmentConfig()
NO_ADAPTER = AdapterConfig()


class VllmEngine:
    """One vLLM engine, whose weights can be replaced.

    Args:
        model_path: folder in Hugging Face format, whose weights are used until the first push; or a converted folder,
            with which nothing can be sampled before the first push.
        config: settings of the engine.
        max_sequence_tokens: maximum length of prompt plus response.
        seed: vLLM's own seed; each response has its own.
        num_threads: threads of this process, on a CPU; 0: as they are.
        environment: answers the policy's turns; one without a name: a response is one turn.
        data: the prompts' form, for an environment.
        awaits_push: nothing is sampled before the first push, so that no weights are read from the folder: of 64 GPUs
            each engine would read the whole model to throw it away.
        adapter: adapters of the run; if they travel alone, the folder's weights are read and stay.
        in_rounds: no conversation goes on before all have been answered, so that they repeat bit for bit; with
            ``config.is_continuous`` none waits in any case.
        node: the first node of an engine that has several; None: all workers are on this machine.

    Attributes:
        weights: weights in all workers, which pushes replace.
        has_environment: whether requests need their problems.
        num_workers: number of vLLM's workers.
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
        node: EngineNode | None = None,
    ) -> None:
        from vllm import LLM

        architecture = read_architecture(Path(model_path))
        self._on_gpu = torch.cuda.is_available()
        if num_threads and not self._on_gpu:
            torch.set_num_threads(num_threads)  # vLLM's worker, which is built now, forbids it
        reads_weights = _reads_weights(model_path, architecture, awaits_push=awaits_push, adapter=adapter)
        arguments = vllm_arguments(
            model_path,
            config,
            max_sequence_tokens=max_sequence_tokens,
            seed=seed,
            reads_weights=reads_weights,
            adapter=adapter,
            node=node,
        )
        self._llm = LLM(**arguments)
        self._llm.collective_rpc("gtpo_begin")
        self._executor = self._llm.llm_engine.engine_core.engine_core.model_executor
        self.num_workers = config.ranks_per_engine
        self._max_concurrent = config.max_concurrent_sequences
        self._vocab_size = self._llm.model_config.get_vocab_size()
        self._experts = architecture.experts
        self._keeps_entropies = config.entropy_source == "rollout"
        self._returns_routing = config.returns_routing
        self._captures_routing = captures_routing(config, on_gpu=self._on_gpu)
        if self._captures_routing:
            self._llm.collective_rpc("gtpo_capture_routing")
        self._stop_ids = _stop_token_ids(model_path)
        self.has_environment = bool(environment.name)
        self._max_turn_tokens = environment.max_turn_tokens or max_sequence_tokens
        self._conversation: EnvironmentTurns | None = None
        if self.has_environment:
            assert data is not None, "an environment's prompts are rendered as the data's"
            self._conversation = _environment_turns(
                environment,
                data,
                load_tokenizer(model_path),
                stop_ids=self._stops_of(config.sampling),
                in_rounds=in_rounds and not config.is_continuous,
            )
        self._in_flight = InFlight(self._llm.llm_engine, self._conversation)
        self._next_response = 0
        self._has_sampled = False
        self._with_entropies: set[Hashable] = set()
        self.weights = EngineWeights(self._llm, self._in_flight, config, adapter=adapter, are_policy=reads_weights)
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
            seed: seed of the run.
            priority: rank in the queue of ``rollout.is_continuous``: the lowest number is served first.
            ticket: ticket of these requests; None: a number is made.

        Returns:
            The ticket of these requests.

        Raises:
            RolloutError: the engine has no usable weights.
        """
        self.weights.check()
        # at temperature 0 there is no distribution, and vLLM's first runner asks no processor: only evaluations have it
        has_entropies = self._keeps_entropies and sampling.temperature > 0

        def add_turn(
            request: SampleRequest, tokens: Sequence[int], turn: int, num_sampled: int, stop: Sequence[str]
        ) -> int:
            left = min(sampling.max_response_tokens - num_sampled, self._max_turn_tokens)
            of_turn = replace(sampling, max_response_tokens=left, stop_strings=(*sampling.stop_strings, *stop))
            return self._add(tokens, of_turn, request.seed(seed, turn), priority=priority)

        ticket = self._in_flight.begin(
            requests,
            add_turn,
            version=self.weights.version,
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
        self.weights.check()
        tickets = self._in_flight.advance(limit_s=limit_s)
        if tickets and not self._has_sampled:
            logger.info(FIRST_RESPONSES)
            self._has_sampled = True
        if not self._on_gpu and not self._llm.llm_engine.has_unfinished_requests():
            return_scarce_memory()  # the trainer needs it next
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
            version=self.weights.version,
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
        self.weights.check()

        def add(request: SampleRequest) -> int:
            return self._add(request.prompt_ids, sampling, request.seed(seed), with_logprobs=False)

        return stream_responses(self._llm.llm_engine, add, requests, max_concurrent=self._max_concurrent)

    def _stops_of(self, sampling: SamplingConfig) -> list[int]:
        """The tokens that end a turn."""
        return [*self._stop_ids, *sampling.stop_token_ids]

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
            tokens_input(list(tokens), cache_salt=str(self.weights.version)),
            params,
            lora_request=self.weights.lora,
            priority=priority,
        )
        return number

    def _take_entropies(self, episodes: Sequence[SampledEpisode]) -> dict[int, list[float]]:
        numbers = [turn.number for episode in episodes for turn in episode.turns]
        taken, vocab_size = self._llm.collective_rpc("gtpo_take_entropies", args=(numbers,))[0]
        if vocab_size != self._vocab_size:
            raise RolloutError(
                f"vLLM sampled from {vocab_size} columns, the model's config.json says vocab_size={self._vocab_size}; "
                f"entropies would be of another distribution than the trainer's: use entropy_source='actor'"
            )
        return {number: taken[number] for number in numbers}

    def _take_routing(self, episodes: Sequence[SampledEpisode]) -> list[Tensor]:
        """Per response of one turn the experts of the tokens that were run, ``[n, M, k]``."""
        last = [episode.turns[-1] for episode in episodes]
        num_tokens = [len(episode.sequence(0)) - 1 for episode in episodes]
        if self._captures_routing:
            numbers = [turn.number for turn in last]
            taken: list[Tensor] = self._llm.collective_rpc("gtpo_take_routing", args=(numbers, num_tokens))[0]
            return taken
        assert self._experts is not None, "check_sampler refuses routing of a dense model"
        return [
            returned_routing(episode.request, turn.completion, count, experts=self._experts)
            for episode, turn, count in zip(episodes, last, num_tokens, strict=True)
        ]

    def forget_prefixes(self) -> None:
        """Empties the prefix cache, so that the next generation does not depend on earlier ones."""
        self.weights.forget_prefixes(with_running=False)

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
        if not self._on_gpu:
            logger.info("the engine does not sleep: there is no GPU to share")
            return
        if self._asleep == ALL_MEMORY:
            return  # as after the start
        self._llm.sleep(level=1 if keep_weights or self.weights.lora is not None else 2)
        self._asleep = set(ALL_MEMORY)

    def wake(self, what: str) -> None:
        """Allocates GPU memory for weights or keys and values again, if the engine sleeps."""
        if what in self._asleep:
            self._llm.wake_up(tags=[what])
            self._asleep.discard(what)


def vllm_arguments(
    model_path: str,
    config: RolloutConfig,
    *,
    max_sequence_tokens: int,
    seed: int,
    reads_weights: bool,
    adapter: AdapterConfig,
    node: EngineNode | None,
) -> dict[str, Any]:
    """All arguments of vLLM for an engine, or for its workers on one of several nodes; the cache is of this machine."""
    from vllm.config import WeightTransferConfig

    from gtpo_megatron.rollout import vllm_worker, weight_engine

    architecture, on_gpu = read_architecture(Path(model_path)), torch.cuda.is_available()
    cache_mib = config.gpu_cache_mib
    if not on_gpu:
        cache_mib = log_cpu_cache(config, architecture, max_tokens=max_sequence_tokens)
    arguments = llm_arguments(
        config,
        architecture,
        on_gpu=on_gpu,
        cache_mib=cache_mib,
        max_sequence_tokens=max_sequence_tokens,
        seed=seed,
        reads_weights=reads_weights,
        adapter=adapter,
    )
    return arguments | {
        "model": model_path,
        "worker_extension_cls": f"{vllm_worker.__name__}.{vllm_worker.WorkerExtension.__name__}",
        "weight_transfer_config": WeightTransferConfig(backend=weight_engine.BACKEND),
        **({} if node is None else node.arguments()),
    }


def follow(
    model_path: str,
    config: RolloutConfig,
    *,
    max_sequence_tokens: int,
    seed: int,
    adapter: AdapterConfig,
    node: EngineNode,
    on_death: Callable[[], None],
) -> FollowingWorkers:
    """Starts the workers of an engine that awaits a push on one of its further nodes; waits until all nodes are up.

    Arguments are those of :class:`VllmEngine`; ``on_death`` is called in another thread when a worker has died.
    """
    reads_weights = _reads_weights(model_path, read_architecture(Path(model_path)), awaits_push=True, adapter=adapter)
    arguments = vllm_arguments(
        model_path,
        config,
        max_sequence_tokens=max_sequence_tokens,
        seed=seed,
        reads_weights=reads_weights,
        adapter=adapter,
        node=node,
    )
    return FollowingWorkers(arguments, on_death)


def _reads_weights(model_path: str, architecture: Architecture, *, awaits_push: bool, adapter: AdapterConfig) -> bool:
    """Whether vLLM reads the folder's weights; else it makes some of no meaning, until the first push."""
    is_readable = converted_weights(Path(model_path)) is None and not architecture.is_quantized
    return (adapter.pushes_alone or not awaits_push) and is_readable


def _stop_token_ids(model_path: str) -> list[int]:
    """The tokens that end a response; not by vLLM's tokenizer, which converts a sentencepiece model to another one."""
    found = stop_token_ids(Path(model_path), load_tokenizer(model_path))
    if not found:
        raise RolloutError("the model folder declares no eos_token_id; responses would all run to the length limit")
    return found


def _environment_turns(
    environment: EnvironmentConfig, data: DataConfig, tokenizer: Any, *, stop_ids: Sequence[int], in_rounds: bool
) -> "EnvironmentTurns":
    """Starts the workers of an environment; an engine without one imports nothing of conversations."""
    from gtpo_megatron.rollout.conversation import EnvironmentTurns

    return EnvironmentTurns(environment, data, tokenizer, stop_ids=stop_ids, in_rounds=in_rounds)
