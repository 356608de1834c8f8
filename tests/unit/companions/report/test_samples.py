import base64
from dataclasses import replace

import numpy as np
import pytest

from gtpo_megatron.companions.report.packed import unpacked
from gtpo_megatron.companions.report.run_data import RunData
from gtpo_megatron.companions.report.sampled_groups import sampled_groups
from gtpo_megatron.companions.report.samples import num_bytes, samples
from gtpo_megatron.run_folder.rollout_log import RolloutRecord
from tests.unit.companions.report.run_folders import response

ENOUGH = 10**9


def numbers(text):
    """Of one value per token, as the page's script reads them."""
    return unpacked(base64.b64decode(text)).tolist()


def texts(sampled, response):
    return [sampled["words"][index] for index in np.frombuffer(base64.b64decode(response["tokens"]), "<u2")]


def shown_runs(runs, *, max_bytes=ENOUGH):
    return samples(runs, max_bytes=max_bytes)[0]["runs"]


def run_of(*groups, threshold=0.5, name="run"):
    sampled = [
        sampled_groups(step, records, threshold=threshold, max_groups=1) for step, records in enumerate(groups, start=1)
    ]
    return RunData(
        name=name, config={}, config_text="", metrics=[], groups=tuple(group for (group,) in sampled), remarks=()
    )


def record(tokens, entropy, advantages, reward=1.0):
    return RolloutRecord(
        group_id=0, policy_version=0, prompt="p", response="".join(tokens), tokens=tokens, token_entropy=entropy,
        shaped_rewards=[1.0] * len(tokens), advantages=advantages, reward=reward, truncated=False,
    )  # fmt: skip


def test_all_responses_have_their_text_and_numbers():
    group = [response(0, reward) for reward in (0.0, 1.0, 0.0, 1.0, 1.0, 0.0)]
    sampled, _ = samples([run_of(group)], max_bytes=ENOUGH)
    (run,) = sampled["runs"]
    (shown,) = run["groups"]
    assert [numbers(each["entropy"]) for each in shown["responses"]] == [[0, 1, 0.5]] * 6
    assert [texts(sampled, each) for each in shown["responses"]] == [list(group[0].tokens)] * 6
    assert numbers(shown["responses"][1]["advantages"]) == [0.5, 2, -0.25]
    assert run["scales"] == {"entropy": 1, "shaped_rewards": 1.1, "advantages": 2}


def test_the_runs_own_threshold_decides_what_is_correct_and_meeting_it_is_enough():
    def verdicts(threshold):
        (run,) = shown_runs([run_of([response(0, 0.6), response(0, 0.7)], threshold=threshold)])
        return [each["kind"] for each in run["groups"][0]["responses"]]

    assert verdicts(0.7) == ["incorrect", "correct"]
    as_float32 = float(np.float32(0.7))  # as it is logged, and below 0.7
    (run,) = shown_runs([run_of([response(0, as_float32), response(0, 0.2)], threshold=0.7)])
    assert [each["kind"] for each in run["groups"][0]["responses"]] == ["correct", "incorrect"]
    assert verdicts(0.5) == ["correct", "correct"]


def test_a_response_without_a_verdict_is_of_neither_kind():
    unclear = [replace(response(0, reward), reward_failed=True, truncated=True) for reward in (1.0, 0.0, 0.0)]
    run = run_of([*unclear, response(0, 0.0)])
    (data,) = shown_runs([run])
    shown = data["groups"][0]["responses"]
    assert [(each["kind"], each["truncated"]) for each in shown] == [("ungraded", True)] * 3 + [("incorrect", False)]


def test_the_means_are_of_the_whole_response_however_much_is_shown():
    long = record(["t"] * 1500, [0.0] * 1024 + [1.0] * 476, [1.0] * 1024 + [-1.0] * 476)
    shown = shown_runs([run_of([long] * 4)], max_bytes=13_000)[0]["groups"][0]["responses"]
    assert {len(numbers(each["entropy"])) for each in shown} == {256}
    assert (shown[0]["length"], len(numbers(shown[0]["tokens"]))) == (1500, 256)
    assert (shown[0]["mean_entropy"], shown[0]["mean_advantage"]) == (round(476 / 1500, 4), round(548 / 1500, 4))


def test_nothing_to_tell_apart_has_a_scale_of_zero_and_an_empty_response_is_shown():
    flat = replace(response(0, 1.0), token_entropy=[0.0] * 3, shaped_rewards=[0.0] * 3, advantages=[0.0] * 3)
    empty = replace(response(0, 0.0), response="", tokens=(), token_entropy=(), shaped_rewards=(), advantages=())
    (run,) = shown_runs([run_of([flat, empty])])
    assert run["scales"] == {"entropy": 0, "shaped_rewards": 0, "advantages": 0}
    assert run["groups"][0]["responses"][1]["length"] == 0


def test_long_responses_are_cut_before_groups_are_left_out():
    long = [response(0, 1.0, tokens=("a", "b", "c") * 400), response(0, 0.0, tokens=("a", "b", "c") * 400)]
    run = run_of(*[long] * 64)
    whole = num_bytes(shown_runs([run])[0]["groups"])
    sampled, remarks = samples([run], max_bytes=int(0.6 * whole))
    (cut,) = sampled["runs"]
    assert remarks == []
    assert {len(texts(sampled, each)) for group in cut["groups"] for each in group["responses"]} == {512}
    assert cut["groups"][0]["responses"][0]["length"] == 1200
    sampled, remarks = samples([run], max_bytes=int(0.06 * whole))
    (fewer,) = sampled["runs"]
    assert remarks == ["run: 16 of 64 sampled groups are shown, to keep this page small."]
    assert [group["step"] for group in fewer["groups"]] == list(range(4, 65, 4))
    assert [each["groups"] for each in shown_runs([run, run_of(long)], max_bytes=9)] == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("token", ["因此", "<", "\x00", '"', "\ud83d", "a"])
@pytest.mark.parametrize("number", [1.0, -1.23e-05, 0.333])
def test_the_budget_holds_whatever_the_characters_and_numbers(token, number):
    rows = [
        replace(record([token] * 300, [abs(number)] * 300, [number] * 300), prompt=token * 5000, answer=token * 5000)
        for _ in range(8)
    ]
    run = run_of(*[rows] * 12)
    for max_bytes in (1_000_000, 400_000, 150_000):
        sampled, _ = samples([run], max_bytes=max_bytes)
        taken = num_bytes([sampled["runs"][0]["groups"], sampled["words"]])
        assert 0.2 * max_bytes < taken <= max_bytes


def test_the_page_is_told_which_tokens_are_somebody_elses():
    mixed = replace(record(["a", "x", "b"], [1.0, 0.0, 2.0], [1.0, 0.0, -1.0]), foreign_spans=[(1, 2)])
    sampled, _ = samples([run_of([mixed, record(["a"], [1.0], [1.0])])], max_bytes=ENOUGH)
    first, plain = sampled["runs"][0]["groups"][0]["responses"]
    assert (texts(sampled, first), first["foreign"]) == (["a", "x", "b"], [1])
    assert (first["num_tokens"], first["length"]) == (3, 2)
    assert (numbers(first["entropy"]), numbers(first["advantages"])) == ([1, 2], [1, -1])
    assert plain["foreign"] == []


def test_more_different_tokens_than_indices_are_cut_as_too_many_bytes_are(monkeypatch):
    monkeypatch.setattr("gtpo_megatron.companions.report.samples.MAX_WORDS", 300)
    run = run_of([record([f"{number}" for number in range(1000)], [1.0] * 1000, [1.0] * 1000)])
    sampled, _ = samples([run], max_bytes=ENOUGH)
    assert texts(sampled, sampled["runs"][0]["groups"][0]["responses"][0]) == [f"{number}" for number in range(256)]
