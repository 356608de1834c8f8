"""An evaluation holds conversations, a window at a time; the environment's verdicts are written as graders' are."""

from dataclasses import replace

import pytest

from gtpo_megatron.companions.evaluate.benchmark_run import BenchmarkRun, wanted_responses
from gtpo_megatron.companions.evaluate.conversations import ConversationSource
from gtpo_megatron.config.evaluate import EvaluateConfig
from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.rollout.requests import SampleRequest
from tests.unit.companions.evaluate.makers import Letters, TalkingEngine, open_file, problem_set, saved_verdicts

REQUESTS = [
    replace(SampleRequest(prompt_ids=(1,), group_id=group, sample=sample), problem=problem)
    for group, problem in enumerate(problem_set("x", 5).problems)
    for sample in range(2)
]


def test_every_request_ends_once_and_no_more_are_inside_than_the_window():
    engine = TalkingEngine()
    source = ConversationSource(engine=engine, max_concurrent=2)
    found = list(source.stream(REQUESTS, SamplingConfig(), seed=0))
    assert sorted(one.index for one in found) == list(range(10))
    assert engine.most == 4
    assert [one.token_ids for one in sorted(found, key=lambda one: one.index)][3] == (1, 99, 1)
    assert {one.num_own_tokens for one in found} == {2}


def test_what_is_under_way_is_given_up_with_the_stream():
    engine = TalkingEngine()
    stream = ConversationSource(engine=engine, max_concurrent=2).stream(REQUESTS, SamplingConfig(), seed=0)
    next(stream)
    stream.close()
    assert len(engine.aborted) == 3
    assert len(engine.inside) == 3


class NoGrader:
    def submit(self, request):
        pytest.fail("the environment has graded it")


def test_verdicts_are_the_environments(tmp_path):
    file = open_file(tmp_path)
    wanted = wanted_responses({"x": problem_set("x", 2)}, 2)
    engine = TalkingEngine(
        fails=lambda request: "reset raised" if request.group_id == 0 and request.sample == 0 else ""
    )
    seen = []
    BenchmarkRun(
        config=EvaluateConfig(benchmarks=("b=b.jsonl",), samples=2),
        file=file,
        tokenizer=Letters(),
        source=ConversationSource(engine=engine, max_concurrent=8),
        pool=NoGrader(),
        answer_in=None,
        problems={},
        on_verdict=seen.append,
    ).run(wanted, [])
    file.close()
    rows = {row.key: row for row in saved_verdicts(file.path)}
    assert len(seen) == len(rows) == 4
    assert engine.problems == ["x-0", "x-0", "x-1", "x-1"]
    good, bad = rows["x", "x-1", 1], rows["x", "x-0", 0]
    assert (good.reward, good.failure, good.num_tokens, good.is_truncated) == (0.25, None, 2, True)
    assert good.parts == {"turns": 2.0}, "no times, in which two evaluations differ"
    assert (bad.reward, bad.failure) == (0.0, "reset raised")


@pytest.mark.parametrize(
    ("failure", "refusal", "kept"),
    [
        ("", "n=2", '{"refused": "n=2"}'),
        ("late", "n=2", '{"refused": "n=2"}'),
        ("refused: n=2", "n=2", ""),
        ("", "", ""),
    ],
)
def test_a_refused_request_stays_with_the_verdict(failure, refusal, kept):
    source = ConversationSource(engine=TalkingEngine(lambda _: failure, refusal), max_concurrent=8)
    (wanted,) = wanted_responses({"x": problem_set("x", 1)}, 1)
    (played,) = source.stream([wanted.request], SamplingConfig(), seed=0)
    assert (played.verdict.info, played.verdict.failure) == (kept, failure or None)
