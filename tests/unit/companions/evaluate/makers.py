"""Problems, responses and stand-ins for the sampler and the grader."""

import json
from concurrent.futures import Future

import torch

from gtpo_megatron.batch import EpisodeResult, Problem, RolloutBatch
from gtpo_megatron.companions.evaluate.verdict_file import GradedResponse, MeasuredSet, VerdictFile
from gtpo_megatron.config.problems import DatasetRef
from gtpo_megatron.data.prompts import ProblemSet
from gtpo_megatron.rewards.request import Verdict
from gtpo_megatron.rollout.response_stream import SampledResponse


def problem_set(name, num):
    problems = tuple(Problem(problem_id=f"{name}-{i}", prompt_ids=(i,), answer=str(i)) for i in range(num))
    return ProblemSet(
        dataset=DatasetRef(name=name, path=f"{name}.jsonl"),
        origin=f"{name}.jsonl",
        problems=problems,
        questions=tuple(f"question {i}" for i in range(num)),
        prompt_digests=tuple(str(i).encode() for i in range(num)),
        num_rows=num,
        num_repeated=0,
        num_conflicting=0,
        num_dropped_long=0,
        num_ungradable=0,
        notes=(),
        content_sha256="c0",
    )


IDENTITY = {"seed": 1, "sampling": {"temperature": 1.0}}


def open_file(folder, answer_in=None, *, reward_source="", **changes):
    """The verdict file of an evaluation."""
    folder.mkdir(parents=True, exist_ok=True)
    return VerdictFile(folder / "verdicts.jsonl", IDENTITY | changes, answer_in, reward_source=reward_source)


def saved_verdicts(path):
    """Every graded response of a file with its text, in order of time."""
    records = [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return [GradedResponse(**record) for record in records if "response" in record]


def measured_set(name, num, content="c0", contamination=None):
    return MeasuredSet(
        dataset=name,
        origin=f"{name}.jsonl",
        content_sha256=content,
        num_rows=num,
        num_repeated=0,
        num_dropped_long=0,
        problem_ids=tuple(f"{name}-{i}" for i in range(num)),
        contamination=contamination,
    )


def graded(
    problem_id="x-0", sample=0, *, reward=0.0, failure=None, answer=None, is_truncated=False, num_tokens=1, **changes
):
    """A response of the problem ``LABEL-NUMBER``."""
    settings = {
        "benchmark": problem_id.rpartition("-")[0],
        "problem_id": problem_id,
        "sample": sample,
        "seed": sample,
        "reference": problem_id.rpartition("-")[2],
        "reward": reward,
        "failure": failure,
        "is_truncated": is_truncated,
        "num_tokens": num_tokens,
        "answer": answer,
        "response": f"text {sample}",
    }
    return GradedResponse(**settings | changes)


def fill(file, label, num, *, samples=2, reward=1.0):
    """All samples of the first problems."""
    for i in range(num):
        for sample in range(samples):
            file.append(graded(f"{label}-{i}", sample, reward=reward, answer="1", num_tokens=4))


class Letters:
    """Decodes token ids to their numbers."""

    chat_template = None
    all_special_tokens = ()

    def get_vocab(self):
        return {}

    def decode(self, ids, *, skip_special_tokens):
        return " ".join(map(str, ids))

    def batch_decode(self, rows, *, skip_special_tokens):
        assert skip_special_tokens
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in rows]


class Sampler:
    """Answers request ``i`` with the tokens (prompt, i); the last request ends first. Breaks after so many."""

    def __init__(self, break_after=None, error=KeyboardInterrupt):
        self.requests = []
        self.break_after = break_after
        self.error = error
        self.is_closed = False

    def stream(self, requests, sampling, *, seed):
        self.requests = list(requests)
        try:
            for count, (index, request) in enumerate(reversed(list(enumerate(requests)))):
                if count == self.break_after:
                    raise self.error
                yield SampledResponse(index=index, token_ids=(*request.prompt_ids, index), is_truncated=index % 2 == 0)
        finally:
            self.is_closed = True


class Grader:
    """Calls a response right if its first token is its problem's answer; verdicts come ``delay`` rows late."""

    def __init__(self, delay=0):
        self.delay = delay
        self.graded = []
        self._late = []

    def submit(self, request):
        self.graded.append((request.response, request.answer))
        verdict = Future()
        self._late.append((verdict, Verdict(reward=float(request.response.split()[0] == request.answer))))
        while len(self._late) > self.delay:
            late, found = self._late.pop(0)
            late.set_result(found)
        return verdict

    def finish(self):
        self.delay = 0
        while self._late:
            late, found = self._late.pop(0)
            late.set_result(found)


def episode(request, *, failure="", refusal=""):
    """Its sample, what somebody else says, and its problem's position."""
    return RolloutBatch(
        prompt_ids=torch.tensor([[1]]),
        prompt_lengths=torch.tensor([1]),
        response_ids=torch.tensor([[request.sample, 99, request.group_id]]),
        response_lengths=torch.tensor([3]),
        loss_mask=torch.tensor([[True, False, True]]),
        rollout_logprobs=torch.zeros(1, 3),
        group_ids=torch.tensor([request.group_id]),
        truncated=torch.tensor([request.sample == 1]),
        policy_version=0,
        results=(
            EpisodeResult(
                reward=0.25,
                parts=dict.fromkeys(("turns", "environment_s", "environment_wait_s"), 2.0),
                failure=failure,
                refusal=refusal,
            ),
        ),
    )


class TalkingEngine:
    """Ends the two episodes that were begun last in each call; an environment ``fails`` for some requests."""

    def __init__(self, fails=lambda _: "", refusal=""):
        self.refusal = refusal
        self.inside, self.most, self.aborted, self.problems, self.num = {}, 0, [], [], 0
        self.fails = fails

    def begin(self, requests, sampling, *, seed):
        (request,) = requests
        self.num += 1
        self.inside[self.num] = request
        self.problems.append(request.problem.problem_id)
        self.most = max(self.most, len(self.inside))
        return self.num

    def advance(self, *, limit_s):
        return list(self.inside)[-2:]

    def take(self, ticket):
        request = self.inside.pop(ticket)
        return episode(request, failure=self.fails(request), refusal=self.refusal)

    def abort(self, ticket):
        self.aborted.append(ticket)
