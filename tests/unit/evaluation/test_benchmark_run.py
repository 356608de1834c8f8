import json
from concurrent.futures import Future

import pytest

from gtpo_megatron.config.evaluate import EvaluateConfig
from gtpo_megatron.errors import RolloutError, WorkerError
from gtpo_megatron.evaluation.answers import AnswerFinder
from gtpo_megatron.evaluation.benchmark_run import BenchmarkRun
from gtpo_megatron.evaluation.response_file import read_responses
from gtpo_megatron.rewards.worker_process import Verdict
from gtpo_megatron.rollout.requests import SampleRequest
from tests.unit.evaluation.makers import Grader, Letters, Sampler, benchmark

SAMPLES = 2


def last_token(text):
    return text.split()[-1]


def run(benchmarks, sampler, grader=None, on_response=lambda *_: None, answer_in=last_token):
    config = EvaluateConfig(benchmarks=("b=b.jsonl",), samples=SAMPLES, seed=5)
    made = BenchmarkRun(
        config=config,
        tokenizer=Letters(),
        source=sampler,
        grader=grader or Grader(),
        answer_in=answer_in,
        on_response=on_response,
    )
    try:
        made.run(benchmarks)
    finally:
        for one in benchmarks:
            one.file.close()
    return made


def test_every_response_is_sampled_graded_and_written_once(tmp_path):
    first, second = benchmark(tmp_path, "x", 3), benchmark(tmp_path, "y", 2)
    sampler, grader, seen = Sampler(), Grader(), []
    run([first, second], sampler, grader, lambda b, r: seen.append((b.label, r.problem_id, r.sample)))
    assert len(seen) == len(set(seen)) == 10
    assert [one.missing(SAMPLES) for one in (first, second)] == [[], []]
    assert [len(one.complete(SAMPLES)) for one in (first, second)] == [3, 2]
    rows = list(read_responses(first.file.path))
    assert sorted((r.problem_id, r.sample) for r in rows) == [(f"x-{i}", s) for i in range(3) for s in range(2)]
    assert all(r.reward == 1.0 for r in rows), "the reference went along with its own response"
    row = next(r for r in rows if (r.problem_id, r.sample) == ("x-2", 1))
    assert (row.response, row.answer, row.num_tokens, row.is_truncated) == ("2 5", "5", 2, False)


def test_a_seed_is_made_of_position_and_sample_alone(tmp_path):
    """As in held-out measurement during training; so neither other benchmarks nor a resumed half change it."""
    sampler, first = Sampler(), benchmark(tmp_path, "x", 2)
    run([first, benchmark(tmp_path, "y", 1)], sampler)
    assert [(r.group_id, r.sample) for r in sampler.requests] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0), (0, 1)]
    written = {(r.problem_id, r.sample): r.seed for r in read_responses(first.file.path)}
    assert written["x-1", 1] == SampleRequest(prompt_ids=(), group_id=1, sample=1).seed(5)


def test_an_interrupt_keeps_what_was_graded_and_the_next_run_does_the_rest(tmp_path):
    sampler = Sampler(break_after=4)
    with pytest.raises(KeyboardInterrupt):
        run([benchmark(tmp_path, "x", 4)], sampler)
    assert sampler.is_closed
    again = benchmark(tmp_path, "x", 4)
    assert len(again.missing(SAMPLES)) == 4
    assert len(again.complete(SAMPLES)) == 2
    rest = Sampler()
    run([again], rest)
    assert len(rest.requests) == 4
    rows = [(r.problem_id, r.sample, r.seed) for r in read_responses(again.file.path)]
    assert len(rows) == len(set(rows)) == 8
    whole = benchmark(tmp_path / "whole", "x", 4)
    run([whole], Sampler())
    assert sorted(rows) == sorted((r.problem_id, r.sample, r.seed) for r in read_responses(whole.file.path))


def test_more_samples_later_are_added_to_those_that_are_there(tmp_path):
    run([benchmark(tmp_path, "x", 2)], Sampler())
    again = benchmark(tmp_path, "x", 2)
    assert again.missing(3) == [(0, 2), (1, 2)]
    assert len(again.complete(1)) == 2


def test_grading_goes_on_behind_generation(tmp_path):
    """Verdicts come three responses late: nothing waits for them, and none is lost."""
    grader = Grader(delay=3)
    seen = []

    def on_response(one, response):
        seen.append(len(grader.graded))

    class Late(Sampler):
        def stream(self, requests, sampling, *, seed):
            yield from super().stream(requests, sampling, seed=seed)
            grader.finish()

    run([benchmark(tmp_path, "x", 4)], Late(), grader, on_response)
    assert len(seen) == 8
    assert seen[0] == 4, "the first verdict was there after four submissions"


def test_a_sampler_that_breaks_keeps_what_was_graded(tmp_path):
    with pytest.raises(RolloutError):
        run([benchmark(tmp_path, "x", 2)], Sampler(break_after=3, error=RolloutError("gone")))
    assert len(benchmark(tmp_path, "x", 2).missing(SAMPLES)) == 1


def test_nothing_missing_samples_nothing(tmp_path):
    run([benchmark(tmp_path, "x", 2)], Sampler())
    sampler = Sampler()
    run([benchmark(tmp_path, "x", 2)], sampler)
    assert sampler.requests == []


def test_time_is_accounted_for(tmp_path):
    made = run([benchmark(tmp_path, "x", 2)], Sampler())
    assert made.timing.generation_s > 0
    assert made.timing.other_s > 0
    assert json.dumps(made.timing.generation_s)


class BrokenGrader:
    """Has no verdict until it is told to; then some rows have lost their worker."""

    def __init__(self, broken):
        self.broken, self.rows = broken, []

    def submit(self, text, answer):
        self.rows.append(Future())
        return self.rows[-1]

    def finish(self):
        for index, row in enumerate(self.rows):
            if index in self.broken:
                row.set_exception(WorkerError(f"row {index}"))
            else:
                row.set_result(Verdict(reward=1.0))


class FinishingSampler(Sampler):
    """All verdicts come after so many responses; then it goes on, or somebody interrupts."""

    def __init__(self, grader, after, error=None):
        super().__init__()
        self.grader, self.after, self.error = grader, after, error

    def stream(self, requests, sampling, *, seed):
        for count, response in enumerate(super().stream(requests, sampling, seed=seed)):
            if count == self.after:
                self.grader.finish()
                if self.error is not None:
                    raise self.error
            yield response
        if self.after == len(requests):
            self.grader.finish()


@pytest.mark.parametrize("after", [5, 8])
def test_workers_that_cannot_be_replaced_cost_their_own_rows_only(tmp_path, after):
    """Several rows fail where a worker is gone; the first is reported, and the others' verdicts are written."""
    one, grader = benchmark(tmp_path, "x", 4), BrokenGrader(broken=(1, 2))
    with pytest.raises(WorkerError, match="row 1"):
        run([one], FinishingSampler(grader, after), grader)
    assert len(one.file.responses) == after - 2


def test_an_interrupt_is_not_hidden_by_a_broken_grader(tmp_path):
    one, grader = benchmark(tmp_path, "x", 4), BrokenGrader(broken=(0,))
    with pytest.raises(KeyboardInterrupt):
        run([one], FinishingSampler(grader, 5, KeyboardInterrupt), grader)
    assert len(one.file.responses) == 4


@pytest.mark.parametrize("result", [IndexError("list index out of range"), 7])
def test_a_final_answer_that_breaks_is_no_answer_and_is_said_once(tmp_path, caplog, result):
    """It serves maj@k alone; the responses are worth more than their votes."""

    def final_answer(text):
        if isinstance(result, Exception):
            raise result
        return result

    one = benchmark(tmp_path, "x", 2)
    run([one], Sampler(), answer_in=AnswerFinder(final_answer))
    assert [r.answer for r in read_responses(one.file.path)] == [None] * 4
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "final_answer" in caplog.text
    assert repr(result) in caplog.text


class Impatient:
    """Has verdicts for the texts it is told only; for the others a reason why not."""

    def __init__(self, *texts, reason="took longer than 1 s"):
        self.texts, self.reason, self.graded = texts, reason, []

    def submit(self, text, answer):
        self.graded.append((text, answer))
        verdict = Future()
        found = Verdict(reward=1.0) if text in self.texts else Verdict(reward=0.0, failure=self.reason)
        verdict.set_result(found)
        return verdict


def test_what_has_no_verdict_is_graded_again_without_sampling(tmp_path):
    """As after a time limit that was too short; no engine is needed."""
    run([benchmark(tmp_path, "x", 2)], Sampler(), Impatient("0 0", "1 2"))
    again, grader, seen = benchmark(tmp_path, "x", 2), Impatient("0 1", reason="took longer than 60 s"), []
    assert again.missing(SAMPLES) == []
    assert [(r.problem_id, r.sample) for r in again.without_verdict(SAMPLES)] == [("x-0", 1), ("x-1", 1)]
    run([again], None, grader, lambda _, r: seen.append((r.problem_id, r.sample, r.failure)))
    assert sorted(grader.graded) == [("0 1", "0"), ("1 3", "1")], "with their texts and references"
    assert sorted(seen) == [("x-0", 1, None), ("x-1", 1, "took longer than 60 s")]
    rows = sorted(read_responses(again.file.path), key=lambda r: (r.problem_id, r.sample))
    assert [(r.reward, r.failure) for r in rows] == [(1.0, None)] * 3 + [(0.0, "took longer than 60 s")]
    assert [(r.response, r.answer, r.num_tokens) for r in rows] == [(f"{i // 2} {i}", str(i), 2) for i in range(4)]
    assert benchmark(tmp_path, "x", 2).without_verdict(SAMPLES)[0].failure == "took longer than 60 s"


def test_what_has_no_verdict_again_for_the_same_reason_leaves_the_file_as_it_is(tmp_path):
    run([benchmark(tmp_path, "x", 2)], Sampler(), Impatient())
    again = benchmark(tmp_path, "x", 2)
    before = again.file.path.read_bytes()
    run([again], None, Impatient())
    assert again.file.path.read_bytes() == before


def test_only_what_is_wanted_now_is_graded_again(tmp_path):
    run([benchmark(tmp_path, "x", 4)], Sampler(), Impatient())
    grader = Impatient()
    run([benchmark(tmp_path, "x", 1)], None, grader)
    assert sorted(grader.graded) == [("0 0", "0"), ("0 1", "0")]


def test_new_samples_and_what_is_graded_again_go_together(tmp_path):
    """Verdicts of both come late; an interrupt keeps those of both that are there."""
    run([benchmark(tmp_path, "x", 1)], Sampler(), Impatient())
    again, grader = benchmark(tmp_path, "x", 2), Grader(delay=2)
    with pytest.raises(KeyboardInterrupt):
        run([again], Sampler(break_after=1), grader)
    assert [text for text, _ in grader.graded] == ["0 1", "0 0", "1 1"]
    assert {key: r.failure for key, r in again.file.responses.items()} == {
        ("x-0", 1): None,
        ("x-0", 0): "took longer than 1 s",
    }
