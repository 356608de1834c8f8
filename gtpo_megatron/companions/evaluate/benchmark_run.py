"""Samples and grades benchmarks; grading runs during generation, and an interrupted evaluation is resumed."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from gtpo_megatron.batch import Problem
from gtpo_megatron.companions.evaluate.conversations import PlayedResponse
from gtpo_megatron.companions.evaluate.verdict_file import GradedResponse, VerdictFile, VerdictKey
from gtpo_megatron.config.evaluate import EvaluateConfig
from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.conversations.graded_text import GradedText
from gtpo_megatron.data.prompts import ProblemSet
from gtpo_megatron.errors import GTPOError
from gtpo_megatron.rewards.request import RewardRequest, Verdict
from gtpo_megatron.rollout.requests import SampleRequest
from gtpo_megatron.rollout.response_stream import SampledResponse
from gtpo_megatron.untrusted.thinking import THINKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from gtpo_megatron.rewards.reward_pool import RewardPool


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedResponse:
    """A response that an evaluation needs.

    Attributes:
        benchmark: label of its benchmark.
        problem: the problem.
        position: index of the problem in the benchmark.
        sample: number of the response among the problem's, from 0.
    """

    benchmark: str
    problem: Problem
    position: int
    sample: int

    @property
    def key(self) -> VerdictKey:
        """The key of its verdict."""
        return self.benchmark, self.problem.problem_id, self.sample

    @property
    def request(self) -> SampleRequest:
        """The request; its seed depends on position and sample only, as in held-out measurement during training."""
        return SampleRequest(
            prompt_ids=self.problem.prompt_ids, group_id=self.position, sample=self.sample, problem=self.problem
        )


def wanted_responses(sets: Mapping[str, ProblemSet], samples: int) -> list[WantedResponse]:
    """All responses of these benchmarks, ordered by problem."""
    return [
        WantedResponse(benchmark=label, problem=problem, position=position, sample=sample)
        for label, problems in sets.items()
        for position, problem in enumerate(problems.problems)
        for sample in range(samples)
    ]


class ResponseSource(Protocol):
    """Who samples: a ``VllmEngine``, or with an environment a ``ConversationSource``."""

    def stream(
        self, requests: Sequence[SampleRequest], sampling: SamplingConfig, *, seed: int
    ) -> Iterator[SampledResponse]:
        """Yields responses as they end; closing the iterator ends the others."""
        ...


@dataclass(slots=True)
class Timing:
    """Seconds after the model was loaded. Grading during generation is not counted.

    Attributes:
        generation_s: waiting for the sampler.
        grading_s: waiting for graders after the last response.
        other_s: decoding, writing verdicts, submitting.
        scoring_s: computing figures and intervals.
    """

    generation_s: float = 0.0
    grading_s: float = 0.0
    other_s: float = 0.0
    scoring_s: float = 0.0

    @property
    def generation_frac(self) -> float | None:
        """Fraction of the time spent in generation; None if no time was measured."""
        total = self.generation_s + self.grading_s + self.other_s + self.scoring_s
        return self.generation_s / total if total else None


@dataclass(slots=True, kw_only=True)
class BenchmarkRun:
    """All benchmarks of one evaluation, as one stream of requests, so that none waits for another's longest response.

    Attributes:
        config: the evaluation's configuration.
        file: the file of verdicts.
        tokenizer: the model's tokenizer.
        source: the sampler; may be None if no response is missing.
        pool: pool that grades the responses that come without a verdict.
        answer_in: function that finds the answer of a response, for maj@k; None: no maj@k.
        problems: every problem by benchmark and id.
        on_verdict: called after each verdict is in the file.
        timing: updated during the run.
    """

    config: EvaluateConfig
    file: VerdictFile
    tokenizer: "PreTrainedTokenizerBase"
    source: ResponseSource | None
    pool: "RewardPool"
    answer_in: Callable[[str], str | None] | None
    problems: Mapping[tuple[str, str], Problem]
    on_verdict: Callable[[GradedResponse], None]
    timing: Timing = field(default_factory=Timing)
    _text: GradedText = field(init=False)
    _in_grading: "deque[tuple[GradedResponse, Future[Verdict]]]" = field(default_factory=deque, init=False)

    def __post_init__(self) -> None:
        self._text = GradedText(self.tokenizer)

    def run(self, missing: Sequence[WantedResponse], without_verdict: Sequence[GradedResponse]) -> None:
        """Samples and grades missing responses, and grades again those without a verdict.

        All verdicts obtained are in the file, also after an error or interrupt.

        Raises:
            RolloutError, WorkerError: the sampler or a grader failed.
        """
        try:
            for known in without_verdict:  # before sampling, so that they are graded during generation
                self._submit(known)
            for response in self._sampled([wanted.request for wanted in missing]):
                start = time.perf_counter()
                sampled = self._ungraded(missing[response.index], response)
                if isinstance(response, PlayedResponse):
                    given: Future[Verdict] = Future()
                    given.set_result(response.verdict)
                    self._in_grading.append((replace(sampled, num_tokens=response.num_own_tokens), given))
                else:
                    self._submit(sampled)
                self._write_down(wait=False)
                self.timing.other_s += time.perf_counter() - start
            start = time.perf_counter()
            self._write_down(wait=True)
            self.timing.grading_s += time.perf_counter() - start
        except BaseException:  # including an interrupt
            with suppress(GTPOError):  # the first error is raised
                self._write_down(wait=False)
            raise

    def _sampled(self, requests: Sequence[SampleRequest]) -> Iterator[SampledResponse]:
        """Yields the sampler's responses; the time until each counts as generation time."""
        if not requests:
            return
        assert self.source is not None, "responses are missing"
        responses = self.source.stream(requests, self.config.sampling, seed=self.config.seed)
        while True:
            start = time.perf_counter()
            response = next(responses, None)
            self.timing.generation_s += time.perf_counter() - start
            if response is None:
                return
            yield response

    def _ungraded(self, wanted: WantedResponse, response: SampledResponse) -> GradedResponse:
        ids = list(response.token_ids)
        is_conversation = isinstance(response, PlayedResponse)
        text = self.tokenizer.decode(ids, skip_special_tokens=True) if is_conversation else self._text.decode([ids])[0]
        opens = self._text.opens_thinking(wanted.problem.prompt_ids)
        return GradedResponse(
            benchmark=wanted.benchmark,
            problem_id=wanted.problem.problem_id,
            sample=wanted.sample,
            seed=wanted.request.seed(self.config.seed),
            reference=wanted.problem.answer,
            reward=0.0,
            failure=None,
            is_truncated=response.is_truncated,
            num_tokens=len(ids),
            answer=None if self.answer_in is None else self.answer_in(f"{THINKING[0][0]}{text}" if opens else text),
            response=text,
        )

    def _submit(self, response: GradedResponse) -> None:
        problem = self.problems[response.benchmark, response.problem_id]
        request = RewardRequest(
            response=response.response,
            answer=problem.answer,
            prompt=problem.prompt,
            columns_json=problem.columns_json,
            ended="length" if response.is_truncated else "stop",
            opens_thinking=self._text.opens_thinking(problem.prompt_ids),
            num_prompt_tokens=len(problem.prompt_ids),
            num_response_tokens=response.num_tokens,
        )
        self._in_grading.append((response, self.pool.submit(request)))

    def _write_down(self, *, wait: bool) -> None:
        """Writes every response that has its verdict; verdicts arrive out of order.

        Raises:
            WorkerError, ConfigError: a worker could not be replaced. The first such error is raised after all other
                verdicts were written.
        """
        broken: BaseException | None = None
        for _ in range(len(self._in_grading)):
            response, verdict = self._in_grading[0]
            if not (wait or verdict.done()):
                self._in_grading.rotate(-1)
                continue
            error = verdict.exception()  # an interrupt during this wait keeps the row in the queue
            self._in_grading.popleft()
            if error is not None:
                broken = broken or error
                continue
            found = verdict.result()
            done = replace(
                response, reward=found.reward, failure=found.failure, parts=dict(found.parts), info=found.info
            )
            if self.file.verdicts.get(done.key) != done:  # not written again if it failed for the same reason
                self.file.append(done)
            self.on_verdict(done)
        if broken is not None:
            raise broken
