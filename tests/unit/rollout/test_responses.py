"""From vLLM's completions to a batch, and what is refused."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gtpo_megatron.errors import RolloutError
from gtpo_megatron.rollout.requests import SampleRequest
from gtpo_megatron.rollout.responses import returned_routing, to_rollout_batch

REQUESTS = [SampleRequest(prompt_ids=(1, 2, 3)[:n], group_id=5, sample=n) for n in (2, 3)]


def span(version, start, end):
    return SimpleNamespace(version=str(version), start=start, end=end)


def completion(tokens, *, reason="stop", spans=None):
    flat = SimpleNamespace(token_ids=list(tokens), logprobs=[-0.5 * t for t in tokens])
    spans = [span(3, 0, len(tokens))] if spans is None else spans
    return SimpleNamespace(token_ids=tokens, finish_reason=reason, logprobs=flat, weight_versions=spans)


def convert(completions, entropies=None):
    return to_rollout_batch(REQUESTS, completions, entropies=entropies)


def test_rows_are_padded_on_the_right():
    batch = convert([completion((7, 8, 9)), completion((4,), reason="length")], [[1.0, 2.0, 3.0, 99.0], [4.0]])
    assert batch.prompt_ids.tolist() == [[1, 2, 0], [1, 2, 3]]
    assert batch.prompt_lengths.tolist() == [2, 3]
    assert batch.response_ids.tolist() == [[7, 8, 9], [4, 0, 0]]
    assert batch.response_lengths.tolist() == [3, 1]
    assert batch.rollout_logprobs.tolist() == [[-3.5, -4.0, -4.5], [-2.0, 0.0, 0.0]]
    assert batch.truncated.tolist() == [False, True]
    assert batch.group_ids.tolist() == [5, 5]
    assert batch.policy_version == 3
    assert batch.token_versions is None
    # a value past the last token belongs to a sample that vLLM threw away
    assert batch.token_entropy.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert convert([completion((7,)), completion((4,))]).token_entropy is None


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (completion(()), "response 3 of group 5: 0 tokens, finish reason 'stop'"),
        (completion((4,), reason="abort"), "finish reason 'abort'"),
        (
            SimpleNamespace(token_ids=(4,), finish_reason="stop", logprobs=None),
            "1 tokens, finish reason 'stop', 0 log-",
        ),
        (
            SimpleNamespace(token_ids=(4, 5), finish_reason="stop", logprobs=SimpleNamespace(token_ids=[4])),
            "2 tokens, finish reason 'stop', 1 log-probs",
        ),
    ],
)
def test_a_response_that_lacks_something_is_refused(bad, message):
    with pytest.raises(RolloutError, match=message):
        convert([completion((7,)), bad])


def test_every_token_has_the_version_of_the_weights_that_sampled_it():
    batch = convert(
        [completion((7, 8, 9), spans=[span(3, 0, 1), span(4, 1, 3)]), completion((4,), spans=[span(4, 0, 1)])]
    )
    assert batch.policy_version == 3
    assert batch.token_versions[batch.response_mask].tolist() == [3, 4, 4, 4]
    assert batch.oldest_versions.tolist() == [3, 4]
    assert batch.is_multi_version.tolist() == [True, False]


@pytest.mark.parametrize(("spans", "num"), [([], 0), ([span(3, 0, 1)], 1)])
def test_tokens_of_unknown_weights_are_refused(spans, num):
    with pytest.raises(RolloutError, match=f"response 2 of group 5: 2 tokens, {num} of them with a policy version"):
        convert([completion((7, 8), spans=spans), completion((4,))])


def test_missing_entropies_are_refused():
    with pytest.raises(RolloutError, match="response 2 of group 5: 2 tokens but 1 entropies"):
        convert([completion((7, 8)), completion((4,))], [[1.0], [1.0]])


def test_routing_that_vllm_returns_is_cut_to_the_tokens_that_were_run():
    found = np.arange(5 * 3 * 2, dtype=np.uint16).reshape(5, 3, 2)
    experts = returned_routing(REQUESTS[0], SimpleNamespace(routed_experts=found), 4, num_experts=64)
    assert experts.dtype == torch.uint8
    assert experts.tolist() == found[:4].tolist()
    assert returned_routing(REQUESTS[0], SimpleNamespace(routed_experts=found), 4, num_experts=512).dtype == torch.int16


@pytest.mark.parametrize(("found", "count"), [(None, 0), (np.zeros((3, 2, 2)), 3)])
def test_routing_of_too_few_tokens_is_refused(found, count):
    with pytest.raises(RolloutError, match=f"response 2 of group 5: routing of {count} of 4 tokens"):
        returned_routing(REQUESTS[0], SimpleNamespace(routed_experts=found), 4, num_experts=8)
