"""From vLLM's completions to a batch, and what is refused."""

from types import SimpleNamespace

import pytest

from gtpo_megatron.errors import RolloutError
from gtpo_megatron.rollout.requests import SampleRequest
from gtpo_megatron.rollout.responses import to_rollout_batch

REQUESTS = [SampleRequest(prompt_ids=(1, 2, 3)[:n], group_id=5, sample=n) for n in (2, 3)]


def completion(tokens, *, reason="stop", logprobs=None):
    flat = SimpleNamespace(token_ids=list(tokens), logprobs=logprobs or [-0.5 * t for t in tokens])
    return SimpleNamespace(token_ids=tokens, finish_reason=reason, logprobs=flat)


def convert(completions, entropies=None):
    return to_rollout_batch(REQUESTS, completions, policy_version=3, entropies=entropies)


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


def test_missing_entropies_are_refused():
    with pytest.raises(RolloutError, match="response 2 of group 5: 2 tokens but 1 entropies"):
        convert([completion((7, 8)), completion((4,))], [[1.0], [1.0]])
