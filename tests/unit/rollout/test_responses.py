"""From vLLM's completions to a batch, and what is refused."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gtpo_megatron.batch import EpisodeResult, take_rows
from gtpo_megatron.errors import RolloutError
from gtpo_megatron.rollout.in_flight import SampledEpisode, Turn
from gtpo_megatron.rollout.requests import SampleRequest
from gtpo_megatron.rollout.responses import returned_routing, to_rollout_batch
from gtpo_megatron.weights.experts import Experts

REQUESTS = [SampleRequest(prompt_ids=(1, 2, 3)[:n], group_id=5, sample=n) for n in (2, 3)]


def span(version, start, end):
    return SimpleNamespace(version=str(version), start=start, end=end)


def completion(tokens, *, reason="stop", spans=None):
    flat = SimpleNamespace(token_ids=list(tokens), logprobs=[-0.5 * t for t in tokens])
    spans = [span(3, 0, len(tokens))] if spans is None else spans
    return SimpleNamespace(token_ids=tokens, finish_reason=reason, logprobs=flat, weight_versions=spans)


def convert(completions, entropies=None):
    episodes = [
        SampledEpisode(request=request, turns=[Turn(context_ids=request.prompt_ids, number=number, completion=one)])
        for number, (request, one) in enumerate(zip(REQUESTS, completions, strict=True))
    ]
    return to_rollout_batch(episodes, version=3, entropies=None if entropies is None else dict(enumerate(entropies)))


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


@pytest.mark.parametrize("reasons", [("length", "stop"), ("stop", "length"), ("stop", "stop")])
def test_a_response_is_cut_if_one_of_its_sequences_is(reasons):
    """The second turn begins anew, so that nothing follows the first."""
    turns = [
        Turn(context_ids=(1, 2), number=number, completion=completion((7 + number,), reason=reason))
        for number, reason in enumerate(reasons)
    ]
    batch = to_rollout_batch([SampledEpisode(request=REQUESTS[0], turns=turns)], version=3, entropies=None)
    assert batch.truncated.tolist() == ["length" in reasons]
    assert batch.branches == (((1, -1),),)
    turns[1].after = 0
    batch = to_rollout_batch([SampledEpisode(request=REQUESTS[0], turns=turns)], version=3, entropies=None)
    assert batch.truncated.tolist() == [reasons[1] == "length"], "it went on after the first"


@pytest.mark.parametrize(("spans", "num"), [([], 0), ([span(3, 0, 1)], 1)])
def test_tokens_of_unknown_weights_are_refused(spans, num):
    with pytest.raises(RolloutError, match=f"response 2 of group 5: 2 tokens, {num} of them with a policy version"):
        convert([completion((7, 8), spans=spans), completion((4,))])


def test_missing_entropies_are_refused():
    with pytest.raises(RolloutError, match="response 2 of group 5: 2 tokens but 1 entropies"):
        convert([completion((7, 8)), completion((4,))], [[1.0], [1.0]])


def experts(*layers, num_experts=64):
    return Experts(num_experts=num_experts, experts_per_token=2, ffn_size=8, layers=layers)


def routing(found, of):
    return returned_routing(REQUESTS[0], SimpleNamespace(routed_experts=found), 4, experts=of)


def test_routing_that_vllm_returns_is_cut_to_the_tokens_that_were_run():
    found = np.arange(5 * 3 * 2, dtype=np.uint16).reshape(5, 3, 2)
    chosen = routing(found, experts(True, True, True))
    assert chosen.dtype == torch.uint8
    assert chosen.tolist() == found[:4].tolist()
    assert routing(found, experts(True, True, True, num_experts=512)).dtype == torch.int16


def test_layers_without_a_router_are_left_out_of_what_vllm_returns():
    """vLLM has a place for every layer, the trainer for every router."""
    found = np.arange(5 * 3 * 2, dtype=np.uint8).reshape(5, 3, 2)
    assert routing(found, experts(False, True, True)).tolist() == found[:4, 1:].tolist()
    assert routing(found, experts(True, False, True)).tolist() == found[:4, ::2].tolist()


@pytest.mark.parametrize(("found", "count"), [(None, 0), (np.zeros((3, 2, 2)), 3)])
def test_routing_of_too_few_tokens_is_refused(found, count):
    with pytest.raises(RolloutError, match=f"response 2 of group 5: routing of {count} of 4 tokens"):
        routing(found, experts(True, True, num_experts=8))


def test_routing_of_another_number_of_layers_is_refused():
    with pytest.raises(RolloutError, match="response 2 of group 5: routing of 2 layers came with it, .* says 3"):
        routing(np.zeros((5, 2, 2)), experts(False, True, True))


def test_what_others_say_is_in_a_row_but_not_the_policys():
    turns = [
        Turn(context_ids=(1, 2), number=4, completion=completion((7, 8), spans=[span(3, 0, 1), span(4, 1, 2)])),
        Turn(context_ids=(5, 5, 5), number=9, completion=completion((9,), reason="length", spans=[span(4, 0, 1)])),
    ]
    result = EpisodeResult(reward=0.5, turn_rewards=(0.0, 0.5), parts={"turns": 2.0})
    ended = SampledEpisode(request=REQUESTS[0], turns=turns, result=result, idle_s=4.0)
    never_begun = SampledEpisode(request=REQUESTS[1], result=EpisodeResult(failure="reset raised"))
    batch = to_rollout_batch([ended, never_begun], version=3, entropies={4: [1.0, 2.0, 99.0], 9: [3.0]})
    assert batch.prompt_ids.tolist() == [[1, 2, 0], [1, 2, 3]]
    assert batch.response_ids.tolist() == [[7, 8, 5, 5, 5, 9], [0] * 6]
    assert batch.response_lengths.tolist() == [6, 0]
    assert batch.loss_mask.tolist() == [[True, True, False, False, False, True], [False] * 6]
    assert batch.own_lengths.tolist() == [3, 0]
    assert batch.rollout_logprobs.tolist() == [[-3.5, -4.0, 0, 0, 0, -4.5], [0] * 6]
    assert batch.token_entropy.tolist() == [[1, 2, 0, 0, 0, 3], [0] * 6]
    assert batch.token_versions.tolist()[0] == [3, 4, 4, 4, 4, 4]
    assert batch.policy_version == 3
    assert batch.truncated.tolist() == [True, False]
    assert batch.results == (
        replace(result, parts={"turns": 2.0, "environment_wait_s": 4.0}),
        EpisodeResult(failure="reset raised", parts={"environment_wait_s": 0.0}),
    )
    chosen = take_rows([batch, batch], [(1, 1), (0, 0)])
    assert chosen.results == batch.results[::-1]


def test_a_batch_without_a_token_has_the_engines_version():
    never_begun = SampledEpisode(request=REQUESTS[0], result=EpisodeResult(failure="reset raised"))
    batch = to_rollout_batch([never_begun], version=8, entropies=None)
    assert (batch.policy_version, batch.token_versions, batch.num_responses) == (8, None, 1)
