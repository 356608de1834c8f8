from concurrent.futures import Future

import pytest

from gtpo_megatron.companions.evaluate.benchmark_run import BenchmarkRun, wanted_responses
from gtpo_megatron.companions.evaluate.evaluation_run import AnswerFinder
from gtpo_megatron.config.evaluate import EvaluateConfig
from gtpo_megatron.errors import RolloutError, WorkerError
from gtpo_megatron.rewards.request import Verdict
from gtpo_megatron.rollout.requests import SampleRequest
from tests.unit.companions.evaluate.makers import Grader, Letters, Sampler, open_file, problem_set, saved_verdicts

SAMPLES = 2


def last_token(text):
    return text.split()[-1]


class Evaluation:
    """As the command runs it, over the file of a folder: ``x=3`` is a benchmark of three problems."""

    def __init__(self, folder, *, samples=SAMPLES, **num_problems):
        self.file = open_file(folder)
        sets = {name: problem_set(name, num) for name, num in num_problems.items()}
        self.wanted = wanted_responses(sets, samples)

    @property
    def missing(self):
        return [one for one in self.wanted if one.key not in self.file.verdicts]

    @property
    def without_verdict(self):
        known = (self.file.verdicts.get(one.key) for one in self.wanted)
        return [one for one in known if one is not None and one.failure is not None]

    @property
    def lines(self):
        return saved_verdicts(self.file.path)

    def run(self, sampler, grader=None, on_verdict=lambda _: None, answer_in=last_token):
        made = BenchmarkRun(
            config=EvaluateConfig(benchmarks=("b=b.jsonl",), samples=SAMPLES, seed=5),
            file=self.file,
            tokenizer=Letters(),
            source=sampler,
            pool=grader or Grader(),
            answer_in=answer_in,
            problems={(one.benchmark, one.problem.problem_id): one.problem for one in self.wanted},
            on_verdict=on_verdict,
        )
        try:
            made.run(self.missing, self.without_verdict)
        finally:
            self.file.close()
        return made


def test_every_response_is_sampled_graded_and_written_once(tmp_path):
    evaluation, sampler, grader, seen = Evaluation(tmp_path, x=3, y=2), Sampler(), Grader(), []
    evaluation.run(sampler, grader, lambda verdict: seen.append(verdict.key))
    assert len(seen) == len(set(seen)) == 10
    assert evaluation.missing == []
    complete = [len(evaluation.file.complete(name, [f"{name}-{i}" for i in range(5)], SAMPLES)) for name in "xy"]
    assert complete == [3, 2]
    rows = evaluation.lines
    assert sorted(r.key for r in rows if r.benchmark == "x") == [("x", f"x-{i}", s) for i in range(3) for s in range(2)]
    assert all(r.reward == 1.0 for r in rows), "the reference went along with its own response"
    row = next(r for r in rows if r.key == ("x", "x-2", 1))
    assert (row.response, row.answer, row.num_tokens, row.is_truncated) == ("2 5", "5", 2, False)
    assert row.reference == "2"


def test_a_seed_is_made_of_position_and_sample_alone(tmp_path):
    """As in held-out measurement during training; so neither other benchmarks nor a resumed half change it."""
    sampler, evaluation = Sampler(), Evaluation(tmp_path, x=2, y=1)
    evaluation.run(sampler)
    assert [(r.group_id, r.sample) for r in sampler.requests] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0), (0, 1)]
    written = {r.key: r.seed for r in evaluation.lines}
    assert written["x", "x-1", 1] == SampleRequest(prompt_ids=(), group_id=1, sample=1).seed(5)


def test_an_interrupt_keeps_what_was_graded_and_the_next_run_does_the_rest(tmp_path):
    sampler = Sampler(break_after=4)
    with pytest.raises(KeyboardInterrupt):
        Evaluation(tmp_path, x=4).run(sampler)
    assert sampler.is_closed
    again = Evaluation(tmp_path, x=4)
    assert len(again.missing) == 4
    assert len(again.file.complete("x", [f"x-{i}" for i in range(4)], SAMPLES)) == 2
    rest = Sampler()
    again.run(rest)
    assert len(rest.requests) == 4
    rows = [(*r.key, r.seed) for r in again.lines]
    assert len(rows) == len(set(rows)) == 8
    whole = Evaluation(tmp_path / "whole", x=4)
    whole.run(Sampler())
    assert sorted(rows) == sorted((*r.key, r.seed) for r in whole.lines)


def test_more_samples_later_are_added_to_those_that_are_there(tmp_path):
    Evaluation(tmp_path, x=2).run(Sampler())
    again = Evaluation(tmp_path, x=2, samples=3)
    assert [(one.position, one.sample) for one in again.missing] == [(0, 2), (1, 2)]
    assert len(again.file.complete("x", ["x-0", "x-1"], 1)) == 2


def test_grading_goes_on_behind_generation(tmp_path):
    """Verdicts come three responses late: nothing waits for them, and none is lost."""
    grader = Grader(delay=3)
    seen = []

    def on_verdict(verdict):
        seen.append(len(grader.graded))

    class Late(Sampler):
        def stream(self, requests, sampling, *, seed):
            yield from super().stream(requests, sampling, seed=seed)
            grader.finish()

    Evaluation(tmp_path, x=4).run(Late(), grader, on_verdict)
    assert len(seen) == 8
    assert seen[0] == 4, "the first verdict was there after four submissions"


def test_a_sampler_that_breaks_keeps_what_was_graded(tmp_path):
    with pytest.raises(RolloutError):
        Evaluation(tmp_path, x=2).run(Sampler(break_after=3, error=RolloutError("gone")))
    assert len(Evaluation(tmp_path, x=2).missing) == 1


def test_nothing_missing_samples_nothing(tmp_path):
    Evaluation(tmp_path, x=2).run(Sampler())
    sampler = Sampler()
    Evaluation(tmp_path, x=2).run(sampler)
    assert sampler.requests == []


def test_time_is_accounted_for(tmp_path):
    timing = Evaluation(tmp_path, x=2).run(Sampler()).timing
    assert timing.generation_s > 0
    assert timing.other_s > 0
    assert 0 < timing.generation_frac < 1


class BrokenGrader:
    """Has no verdict until it is told to; then some rows have lost their worker."""

    def __init__(self, broken):
        self.broken, self.rows = broken, []

    def submit(self, request):
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
    one, grader = Evaluation(tmp_path, x=4), BrokenGrader(broken=(1, 2))
    with pytest.raises(WorkerError, match="row 1"):
        one.run(FinishingSampler(grader, after), grader)
    assert len(one.file.verdicts) == after - 2


def test_an_interrupt_is_not_hidden_by_a_broken_grader(tmp_path):
    one, grader = Evaluation(tmp_path, x=4), BrokenGrader(broken=(0,))
    with pytest.raises(KeyboardInterrupt):
        one.run(FinishingSampler(grader, 5, KeyboardInterrupt), grader)
    assert len(one.file.verdicts) == 4


@pytest.mark.parametrize("result", [IndexError("list index out of range"), 7])
def test_a_final_answer_that_breaks_is_no_answer_and_is_said_once(tmp_path, caplog, result):
    """It serves maj@k alone; the responses are worth more than their votes."""

    def final_answer(text):
        if isinstance(result, Exception):
            raise result
        return result

    one = Evaluation(tmp_path, x=2)
    one.run(Sampler(), answer_in=AnswerFinder(final_answer))
    assert [r.answer for r in one.lines] == [None] * 4
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "final_answer" in caplog.text
    assert repr(result) in caplog.text


class Impatient:
    """Has verdicts for the texts it is told only; for the others a reason why not."""

    def __init__(self, *texts, reason="took longer than 1 s"):
        self.texts, self.reason, self.graded = texts, reason, []

    def submit(self, request):
        self.graded.append((request.response, request.answer))
        verdict = Future()
        found = Verdict(reward=1.0) if request.response in self.texts else Verdict(reward=0.0, failure=self.reason)
        verdict.set_result(found)
        return verdict


def test_what_has_no_verdict_is_graded_again_without_sampling(tmp_path):
    """As after a time limit that was too short; no engine is needed, and what was there before stays."""
    Evaluation(tmp_path, x=2).run(Sampler(), Impatient("0 0", "1 2"))
    before = (tmp_path / "verdicts.jsonl").read_bytes()
    again, grader, seen = Evaluation(tmp_path, x=2), Impatient("0 1", reason="took longer than 60 s"), []
    assert again.missing == []
    assert [r.key for r in again.without_verdict] == [("x", "x-0", 1), ("x", "x-1", 1)]
    again.run(None, grader, lambda r: seen.append((r.problem_id, r.sample, r.failure)))
    assert sorted(grader.graded) == [("0 1", "0"), ("1 3", "1")], "with their texts and references"
    assert sorted(seen) == [("x-0", 1, None), ("x-1", 1, "took longer than 60 s")]
    assert again.file.path.read_bytes().startswith(before)
    assert len(again.lines) == 6
    rows = sorted({r.key: r for r in again.lines}.values(), key=lambda r: r.key)
    assert [(r.reward, r.failure) for r in rows] == [(1.0, None)] * 3 + [(0.0, "took longer than 60 s")]
    assert [(r.response, r.answer, r.num_tokens) for r in rows] == [(f"{i // 2} {i}", str(i), 2) for i in range(4)]
    assert [r.failure for r in Evaluation(tmp_path, x=2).without_verdict] == ["took longer than 60 s"]


def test_what_has_no_verdict_again_for_the_same_reason_leaves_the_file_as_it_is(tmp_path):
    Evaluation(tmp_path, x=2).run(Sampler(), Impatient())
    again = Evaluation(tmp_path, x=2)
    before = again.file.path.read_bytes()
    again.run(None, Impatient())
    assert again.file.path.read_bytes() == before


def test_only_what_is_wanted_now_is_graded_again(tmp_path):
    Evaluation(tmp_path, x=4).run(Sampler(), Impatient())
    grader = Impatient()
    Evaluation(tmp_path, x=1).run(None, grader)
    assert sorted(grader.graded) == [("0 0", "0"), ("0 1", "0")]


def test_new_samples_and_what_is_graded_again_go_together(tmp_path):
    """Verdicts of both come late; an interrupt keeps those of both that are there."""
    Evaluation(tmp_path, x=1).run(Sampler(), Impatient())
    again, grader = Evaluation(tmp_path, x=2), Grader(delay=2)
    with pytest.raises(KeyboardInterrupt):
        again.run(Sampler(break_after=1), grader)
    assert [text for text, _ in grader.graded] == ["0 0", "0 1", "1 1"]
    assert {key: r.failure for key, r in again.file.verdicts.items()} == {
        ("x", "x-0", 0): None,
        ("x", "x-0", 1): "took longer than 1 s",
    }
