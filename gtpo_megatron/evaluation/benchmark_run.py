"""Samples and grades whole benchmarks, some being graded while others are written; goes on where it was broken off."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from gtpo_megatron.config.evaluate import EvaluateConfig
from gtpo_megatron.data.contamination import Contamination
from gtpo_megatron.data.prompts import ProblemSet
from gtpo_megatron.errors import GTPOError
from gtpo_megatron.evaluation.response_file import GradedResponse, ResponseFile, read_responses
from gtpo_megatron.evaluation.scores import ProblemResponses
from gtpo_megatron.rewards.worker_process import Verdict
from gtpo_megatron.rollout.requests import SampleRequest
from gtpo_megatron.rollout.response_stream import ResponseSource, SampledResponse


class Grader(Protocol):
    """What evaluation grades with."""

    def submit(self, text: str, answer: str) -> "Future[Verdict]":
        """Queues one response."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """One benchmark, and the responses there are of it.

    Attributes:
        label: its name.
        problems: of it.
        file: of the responses.
        contamination: by the training set; None where none was looked at.
    """

    label: str
    problems: ProblemSet
    file: ResponseFile
    contamination: Contamination | None = None

    def missing(self, samples: int) -> list[tuple[int, int]]:
        """(position, sample) of every response that is not there, problem by problem."""
        return [
            (position, sample)
            for position, problem in enumerate(self.problems.problems)
            for sample in range(samples)
            if (problem.problem_id, sample) not in self.file.responses
        ]

    def present(self, samples: int) -> list[GradedResponse]:
        """Of the wanted responses those that are there."""
        there = self.file.responses
        wanted = ((p.problem_id, sample) for p in self.problems.problems for sample in range(samples))
        return [there[key] for key in wanted if key in there]

    def without_verdict(self, samples: int) -> list[GradedResponse]:
        """Of those that are there, the ones that must be graded again: by other limits they may have a verdict."""
        return [response for response in self.present(samples) if response.failure is not None]

    def complete(self, samples: int) -> list[ProblemResponses]:
        """Problems whose responses are all there."""
        there = self.file.responses
        return [
            ProblemResponses(
                problem=problem, responses=[there[problem.problem_id, sample] for sample in range(samples)]
            )
            for problem in self.problems.problems
            if all((problem.problem_id, sample) in there for sample in range(samples))
        ]


@dataclass(slots=True)
class Timing:
    """Where the time went once the model was loaded; grading is in none of them while generation hides it.

    Attributes:
        generation_s: waiting for the sampler.
        grading_s: waiting for graders after the last response.
        other_s: decoding, writing down, and handing over.
        scoring_s: from graded responses to figures and intervals.
    """

    generation_s: float = 0.0
    grading_s: float = 0.0
    other_s: float = 0.0
    scoring_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Job:
    """A request and where it belongs."""

    benchmark: Benchmark
    position: int
    sample: int
    request: SampleRequest


@dataclass(slots=True)
class BenchmarkRun:
    """All benchmarks of one evaluation, as one stream of requests: no benchmark waits for another's longest response.

    Attributes:
        config: of the evaluation.
        tokenizer: of the model.
        source: samples; None will do where no response is missing.
        grader: grades.
        answer_in: finds the answer of a response, for maj@k; None: it is left out.
        on_response: called after each response is on disk, with its benchmark; once too for one that is graded again.
        timing: filled as it runs.
    """

    config: EvaluateConfig
    tokenizer: PreTrainedTokenizerBase
    source: ResponseSource | None
    grader: Grader
    answer_in: Callable[[str], str | None] | None
    on_response: Callable[[Benchmark, GradedResponse], None]
    timing: Timing = field(default_factory=Timing)

    def run(self, benchmarks: Sequence[Benchmark]) -> None:
        """Samples and grades what is missing, and grades again what has no verdict.

        However it ends, what has a verdict is in the files.

        Raises:
            RolloutError, WorkerError: the sampler or a grader failed.
        """
        jobs = [
            _Job(benchmark, position, sample, self._request(benchmark, position, sample))
            for benchmark in benchmarks
            for position, sample in benchmark.missing(self.config.samples)
        ]
        graded: deque[_Submitted] = deque()
        try:
            graded.extend(self._submitted_again(benchmarks))
            for response in self._sampled(jobs):
                start = time.perf_counter()
                graded.append(self._submitted(jobs[response.index], response))
                self._write_down(graded, wait=False)
                self.timing.other_s += time.perf_counter() - start
            start = time.perf_counter()
            self._write_down(graded, wait=True)
            self.timing.grading_s += time.perf_counter() - start
        except BaseException:  # an interrupt too
            with suppress(GTPOError):  # of a grader, while another reason to stop is on its way
                self._write_down(graded, wait=False)
            raise

    def _request(self, benchmark: Benchmark, position: int, sample: int) -> SampleRequest:
        """As held-out measurement during training seeds it: by the problem's position and the sample alone."""
        prompt_ids = benchmark.problems.problems[position].prompt_ids
        return SampleRequest(prompt_ids=prompt_ids, group_id=position, sample=sample)

    def _sampled(self, jobs: Sequence[_Job]) -> Iterator[SampledResponse]:
        """The sampler's responses; the time until each is generation time."""
        if not jobs:
            return
        assert self.source is not None, "responses are missing"
        responses = self.source.stream([job.request for job in jobs], self.config.sampling, seed=self.config.seed)
        while True:
            start = time.perf_counter()
            response = next(responses, None)
            self.timing.generation_s += time.perf_counter() - start
            if response is None:
                return
            yield response

    def _submitted_again(self, benchmarks: Sequence[Benchmark]) -> "Iterator[_Submitted]":
        """What has no verdict, from the files: before the first sample, so that it is graded behind generation too."""
        for benchmark in benchmarks:
            wanted = {(r.problem_id, r.sample) for r in benchmark.without_verdict(self.config.samples)}
            answers = {problem.problem_id: problem.answer for problem in benchmark.problems.problems}
            for response in read_responses(benchmark.file.path) if wanted else ():
                key = response.problem_id, response.sample
                if key in wanted:
                    wanted.remove(key)  # of a response that was graded again there may be two lines
                    known = replace(benchmark.file.responses[key], response=response.response)
                    yield benchmark, known, self.grader.submit(response.response, answers[response.problem_id])

    def _submitted(self, job: _Job, response: SampledResponse) -> "_Submitted":
        text: str = self.tokenizer.decode(list(response.token_ids), skip_special_tokens=True)
        problem = job.benchmark.problems.problems[job.position]
        ungraded = GradedResponse(
            problem_id=problem.problem_id,
            sample=job.sample,
            seed=job.request.seed(self.config.seed),
            reward=0.0,
            failure=None,
            is_truncated=response.is_truncated,
            num_tokens=len(response.token_ids),
            answer=None if self.answer_in is None else self.answer_in(text),
            response=text,
        )
        return job.benchmark, ungraded, self.grader.submit(text, problem.answer)

    def _write_down(self, graded: "deque[_Submitted]", *, wait: bool) -> None:
        """Writes every response that has its verdict; rows are done out of order, so each is looked at.

        Raises:
            WorkerError, ConfigError: a worker could not be replaced, which costs all the rows it was given. The first
                such error is raised once everything else is written.
        """
        broken: BaseException | None = None
        for _ in range(len(graded)):
            benchmark, response, verdict = graded[0]
            if not (wait or verdict.done()):
                graded.rotate(-1)
                continue
            error = verdict.exception()  # an interrupt while it waits leaves the row where it is
            graded.popleft()
            if error is not None:
                broken = broken or error
                continue
            found = verdict.result()
            done = replace(response, reward=found.reward, failure=found.failure)
            if benchmark.file.responses.get((done.problem_id, done.sample)) != replace(done, response=""):
                benchmark.file.append(done)
            self.on_response(benchmark, done)
        if broken is not None:
            raise broken


_Submitted = tuple[Benchmark, GradedResponse, Future[Verdict]]
"""A response without its verdict, and the promise of one."""
