"""Requests: what they are, and which engine gets which."""

from collections import Counter

from gtpo_megatron.batch import Problem, PromptBatch
from gtpo_megatron.rollout.requests import SampleRequest, assign_to_engines, requests_for


def request(length=4, group=0, sample=0):
    return SampleRequest(prompt_ids=tuple(range(length)), group_id=group, sample=sample)


def test_requests_are_prompt_major():
    problems = tuple(Problem(problem_id=str(i), prompt_ids=(i,), answer="") for i in range(2))
    made = requests_for(PromptBatch(problems=problems, group_ids=(7, 9)), 3)
    assert [(r.prompt_ids, r.group_id, r.sample) for r in made] == [
        *(((0,), 7, sample) for sample in range(3)),
        *(((1,), 9, sample) for sample in range(3)),
    ]


def test_every_response_has_a_seed_of_its_own_that_stays():
    requests = [request(group=group, sample=sample) for group in range(30) for sample in range(30)]
    assert len({r.seed(0) for r in requests} | {r.seed(1) for r in requests}) == 1800
    assert all(0 <= r.seed(0) < 2**63 for r in requests)
    # the prompt is not part of it; the value is fixed, or old runs could not be repeated
    assert request(length=9, group=3, sample=1).seed(5) == request(group=3, sample=1).seed(5) == 948926467535074067


def test_equal_requests_are_dealt_evenly_and_groups_are_split():
    requests = [request(group=group, sample=sample) for group in range(4) for sample in range(6)]
    engines = assign_to_engines(requests, max_response_tokens=10, loads=[0, 0, 0])
    assert Counter(engines) == {0: 8, 1: 8, 2: 8}
    for group in range(4):
        assert set(engines[6 * group : 6 * group + 6]) == {0, 1, 2}


def test_long_prompts_and_what_is_already_there_count():
    # 100 + 10 tokens on one engine balance 5 x (10 + 10) on the other
    requests = [request(10) for _ in range(5)] + [request(100)]
    assert assign_to_engines(requests, max_response_tokens=10, loads=[0, 0]) == [1, 1, 1, 1, 1, 0]
    # an engine with work left gets less
    engines = assign_to_engines([request(10) for _ in range(6)], max_response_tokens=10, loads=[80, 0])
    assert Counter(engines) == {1: 5, 0: 1}


def test_the_spread_is_at_most_one_request():
    requests = [request(1 + 37 * i % 50, group=i) for i in range(97)]
    engines = assign_to_engines(requests, max_response_tokens=64, loads=[0] * 5)
    totals = [
        sum(len(r.prompt_ids) + 64 for r, e in zip(requests, engines, strict=True) if e == engine)
        for engine in range(5)
    ]
    assert max(totals) - min(totals) <= 50 + 64
