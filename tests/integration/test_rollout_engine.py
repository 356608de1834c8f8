"""One real vLLM engine: entropies at sampling time, stops, seeds, and what it does not do on a CPU."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch

from gtpo_megatron.companions.planner.engine import engine_memory
from gtpo_megatron.companions.planner.known_models import find_shape
from gtpo_megatron.config.rollout import RolloutConfig, SamplingConfig
from gtpo_megatron.data.chat_template import load_tokenizer
from gtpo_megatron.rollout.requests import SampleRequest
from recipes.tiny_cpu import ASSETS
from tests.integration.engine_host import MODEL, EngineHost

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("a rollout engine"),
    pytest.mark.filterwarnings("ignore"),  # of transformers' readers
]

CONFIG = RolloutConfig(
    group_size=2,
    dtype="float32",
    kv_cache_mib=3,  # 48 blocks of 32 tokens: fewer than 24 responses need, which share prompts of 120
    max_concurrent_sequences=24,
    entropy_source="rollout",
)


@pytest.fixture(scope="module")
def host():
    found = EngineHost(CONFIG)
    yield found
    found.close()


@pytest.fixture(scope="module")
def prompts():
    tokenizer = load_tokenizer(MODEL)
    lines = (ASSETS / "arithmetic" / "train.jsonl").read_text().splitlines()[:36]
    messages = [json.loads(line)["prompt"] for line in lines]
    rendered = [tokenizer.apply_chat_template(m, add_generation_prompt=True)["input_ids"] for m in messages]
    # problems in a row, so that every response crosses ends of blocks of 32 tokens, and shares some with three others
    return [
        (*first, *second, *third)[-120:]
        for first, second, third in zip(rendered[::3], rendered[1::3], rendered[2::3], strict=True)
    ]


@pytest.fixture(scope="module")
def reference():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def requests(prompts, samples=4):
    return [
        SampleRequest(prompt_ids=prompt, group_id=group, sample=sample)
        for group, prompt in enumerate(prompts)
        for sample in range(samples)
    ]


def scores_of(model, ids, num_prompt, temperature):
    """Entropies and log-probs of the response's tokens."""
    with torch.no_grad():
        logits = model(ids[None]).logits[0, num_prompt - 1 : -1].double() / temperature
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return entropy, logprobs.gather(1, ids[num_prompt:, None])[:, 0]


def assert_scores(batch, reference, *, temperature, check_logprobs=True):
    """Entropies (and log-probs) of the full distribution at a temperature, by transformers in float64.

    A token may be as far off as transformers in float32 is, and 1e-4 more: at some tokens that alone is more.
    """
    exact = copy.deepcopy(reference).double()
    for i in range(batch.num_responses):
        num_prompt, num = int(batch.prompt_lengths[i]), int(batch.response_lengths[i])
        ids = torch.cat([batch.prompt_ids[i, :num_prompt], batch.response_ids[i, :num]])
        wanted, rounded = (scores_of(model, ids, num_prompt, temperature) for model in (exact, reference))
        found = batch.token_entropy[i, :num], batch.rollout_logprobs[i, :num]
        for one, value, float32 in list(zip(found, wanted, rounded, strict=True))[: 2 if check_logprobs else 1]:
            assert ((one - value).abs() <= 1e-4 + (float32 - value).abs()).all()
        assert not batch.token_entropy[i, num:].any()


def test_entropies_are_those_of_the_model_whatever_vllm_does_to_the_batch(host, prompts, reference):
    """Two waves of requests, preemption, prefixes from the cache: each value stays with its token."""
    sampling = SamplingConfig(temperature=1.2, max_response_tokens=128)
    batch, preemptions = host.ask("generate_and_count_preemptions", requests(prompts), sampling)
    assert preemptions > 0
    assert len(set(batch.response_lengths.tolist())) > 5
    assert_scores(batch, reference, temperature=1.2)
    # all of a prompt but its last token now comes from the cache
    for temperature in (1.2, 1.3, 0.6):
        again = host.generate(requests(prompts), replace(sampling, temperature=temperature))
        assert_scores(again, reference, temperature=temperature)


def test_a_greedy_measurement_has_no_entropies_and_the_next_sample_has(host, prompts, reference):
    """vLLM asks no logits processor for a batch that is all greedy; before and after one that it asks."""
    greedy = SamplingConfig(temperature=0.0, max_response_tokens=24)
    first, again = (host.generate(requests(prompts, samples=1), greedy) for _ in range(2))
    assert first.token_entropy is None
    assert torch.equal(first.response_ids, again.response_ids)
    sampled = host.generate(requests(prompts), replace(greedy, temperature=1.0))
    assert_scores(sampled, reference, temperature=1.0)


def test_entropies_are_of_the_full_distribution_when_sampling_is_truncated(host, prompts, reference):
    sampling = SamplingConfig(temperature=1.0, top_p=0.5, top_k=3, max_response_tokens=24)
    batch = host.generate(requests(prompts[:4]), sampling)
    assert_scores(batch, reference, temperature=1.0, check_logprobs=False)
    assert float(batch.token_entropy.max()) > math.log(3)  # more than three tokens can have


def test_a_stop_token_ends_a_response_and_is_part_of_it(host, prompts):
    free = host.generate(requests(prompts[:4]), SamplingConfig(max_response_tokens=24))
    stop = int(free.response_ids[free.response_lengths > 12][0, 6])  # one that does come up in the middle
    batch = host.generate(requests(prompts[:4]), SamplingConfig(max_response_tokens=24, stop_token_ids=(stop,)))
    rows = [ids[:num].tolist() for ids, num in zip(batch.response_ids, batch.response_lengths, strict=True)]
    assert any(row[-1] == stop for row in rows)
    assert all(stop not in row[:-1] for row in rows)
    cut = batch.truncated.tolist()
    assert any(cut)
    assert all(len(row) == 24 and row[-1] != stop for row, is_cut in zip(rows, cut, strict=True) if is_cut)


def test_a_stop_string_ends_a_response_and_is_part_of_it(host, prompts):
    tokenizer = load_tokenizer(MODEL)
    free = host.generate(requests(prompts[:4]), SamplingConfig(max_response_tokens=24))
    texts = [tokenizer.decode(ids[:num]) for ids, num in zip(free.response_ids, free.response_lengths, strict=True)]
    stop = next(text for text in texts if len(text) > 16)[8:10]
    batch = host.generate(requests(prompts[:4]), SamplingConfig(max_response_tokens=24, stop_strings=(stop,)))
    texts = [tokenizer.decode(ids[:num]) for ids, num in zip(batch.response_ids, batch.response_lengths, strict=True)]
    stopped = [text for text in texts if stop in text]
    assert stopped
    # the token that completes it may go on after it
    assert all(text.find(stop) + len(stop) > len(text.rstrip()) - 8 for text in stopped)
    assert all(not cut for cut, text in zip(batch.truncated.tolist(), texts, strict=True) if stop in text)


def test_a_response_depends_on_its_request_and_not_on_its_company(host, prompts):
    sampling = SamplingConfig(max_response_tokens=24)
    together = host.generate(requests(prompts[:4]), sampling, seed=3)
    alone = [host.generate([request], sampling, seed=3) for request in requests(prompts[:4])[:3]]
    for row, one in enumerate(alone):
        num = int(one.response_lengths[0])
        assert num == together.response_lengths[row]
        assert torch.equal(one.response_ids[0, :num], together.response_ids[row, :num])
    other = host.generate(requests(prompts[:4]), sampling, seed=4)
    width = min(other.response_ids.shape[1], together.response_ids.shape[1])
    assert not torch.equal(other.response_ids[:, :width], together.response_ids[:, :width])


def test_on_a_cpu_the_engine_says_that_it_does_not_sleep(host):
    assert host.ask("what_sleeping_says") == ["the engine does not sleep: there is no GPU to share"]


def test_values_follow_requests_through_a_changing_batch(host):
    taken, second, after, lengths = host.ask("entropies_of_a_batch_that_changes")

    def expected(number, num):
        shares = [(10 * number + i + 1) / 100 for i in range(num)]
        return [-(q * math.log(q) + (1 - q) * math.log(1 - q)) for q in shares]

    assert taken[0] == pytest.approx(expected(0, 5), rel=1e-5)
    assert taken[1] == pytest.approx(expected(1, 2), rel=1e-5)
    assert second[2] == pytest.approx(expected(2, lengths[2]), rel=1e-5)
    assert after == {0: [], 1: []}


def test_the_planner_knows_how_many_tokens_the_cache_holds(host):
    planned = engine_memory(find_shape(MODEL), tensor=1, weight_bytes=4, max_sequences=24, sequence_tokens=224)
    assert host.ask("tokens_of_cache") == (CONFIG.kv_cache_mib << 20) // planned.cache_per_token
