"""Rewards that are in the handles: in the responses' order, with what is told of them."""

import dataclasses
import math

import pytest

from gtpo_megatron.batch import EpisodeResult
from gtpo_megatron.orchestration.stages.environment_rewards import environment_rewards, episode_rewards
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle
from tests.unit.orchestration.stages.test_grading import prompts, rollouts


def handle(*results):
    """Groups are several batches, and responses of one need not stand together."""
    batch = dataclasses.replace(rollouts([70, 71, 70]), results=results)
    return RolloutHandle.of_groups(batch, put=lambda chunk: chunk)


def test_what_an_environment_gave_is_in_the_responses_order_and_its_failures_are_told(caplog):
    given = handle(
        EpisodeResult(reward=0.25, turn_rewards=(0.25,), parts={"turns": 1.0}),
        EpisodeResult(reward=9.0, failure="reset raised"),
        EpisodeResult(reward=0.75, turn_rewards=(0.5, 0.25), parts={"turns": 3.0}),
    )
    with caplog.at_level("WARNING"):
        found = environment_rewards(given, prompts())
    assert found.rewards.tolist() == [0.25, 0.0, 0.75]
    assert found.failed.tolist() == [False, True, False]
    assert found.turn_rewards == ((0.25,), (), (0.5, 0.25))
    assert found.parts["turns"].tolist()[::2] == [1.0, 3.0]
    assert math.isnan(found.parts["turns"][1])
    assert found.failures == {"reset raised": 1}
    assert "1 of 3 responses have no reward: 1 x reset raised (row 1)" in caplog.text
    assert "refused" not in caplog.text


def test_results_go_with_their_responses():
    results = [EpisodeResult(reward=float(row)) for row in range(3)]
    given = handle(*results)
    assert given.results == tuple(results)
    assert given.select([2, 0]).results == (results[2], results[0])
    assert given.fetch().results == ()


@pytest.mark.parametrize("failure", ["", "step raised n=2: no"])
def test_refused_requests_are_told_once_with_the_first_reason(caplog, failure):
    given = handle(
        EpisodeResult(parts={"requests_refused": 0.0}),
        EpisodeResult(parts={"requests_refused": 2.0}, failure=failure, refusal="n=2: no"),
        EpisodeResult(parts={"requests_refused": 1.0}, refusal="stop"),
    )
    with caplog.at_level("WARNING"):
        environment_rewards(given, prompts())
    said = "3 requests of agents were refused, in 2 of 3 episodes, %d of which have no reward: n=2: no (row 1 first)"
    assert caplog.text.count(said % bool(failure)) == 1


@pytest.mark.parametrize(
    ("result", "info"),
    [
        (EpisodeResult(refusal="n=2"), '{"refused": "n=2"}'),
        (EpisodeResult(failure="late", refusal="n=2"), '{"failure": "late", "refused": "n=2"}'),
        (EpisodeResult(failure="refused: n=2", refusal="n=2"), '{"failure": "refused: n=2"}'),
    ],
)
def test_a_refused_request_is_named_also_where_there_is_a_reward(result, info):
    assert episode_rewards([result]).info == (info,)
