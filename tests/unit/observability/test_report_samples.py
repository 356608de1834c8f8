from dataclasses import replace

import pytest

from gtpo_megatron.observability import report_samples
from gtpo_megatron.observability.report_samples import samples
from gtpo_megatron.observability.report_weights import entropy_profiles, heaviest_tokens
from gtpo_megatron.observability.rollout_log import RolloutRecord
from gtpo_megatron.observability.run_folder import RunData, SampledGroup
from tests.unit.observability.run_folders import response


def run_of(*groups, threshold=0.5, name="run"):
    config = {"algorithm": {"success_threshold": threshold}}
    sampled = tuple(SampledGroup(step=step, records=tuple(group)) for step, group in enumerate(groups, start=1))
    return RunData(name=name, config=config, config_text="", metrics=[], groups=sampled, remarks=())


def record(tokens, entropy, advantages, reward=1.0):
    return RolloutRecord(
        group_id=0, policy_version=0, prompt="p", response="".join(tokens), tokens=tokens, token_entropy=entropy,
        shaped_rewards=[1.0] * len(tokens), advantages=advantages, reward=reward, truncated=False,
    )  # fmt: skip


def test_all_responses_have_entropies_and_the_first_of_each_kind_are_text():
    group = [response(0, reward) for reward in (0.0, 1.0, 0.0, 1.0, 1.0, 0.0)]
    (run,) = samples([run_of(group)]).runs
    (shown,) = run["groups"]
    assert [each["entropy"] for each in shown["responses"]] == [[0, 1, 0.5]] * 6
    assert ["tokens" in each for each in shown["responses"]] == [True, True, True, True, False, False]
    assert shown["responses"][1]["advantage"] == [0.5, 2, -0.25]
    assert run["scales"] == {"entropy": 1, "shaped": 1.1, "advantage": 2}


def test_the_runs_own_threshold_decides_what_is_correct_and_meeting_it_is_enough():
    def verdicts(threshold):
        (run,) = samples([run_of([response(0, 0.6), response(0, 0.7)], threshold=threshold)]).runs
        return [each["correct"] for each in run["groups"][0]["responses"]]

    assert verdicts(0.7) == [False, True]
    assert verdicts(0.5) == [True, True]


def test_a_response_without_a_verdict_is_not_correct():
    unclear = replace(response(0, 1.0), reward_failed=True, truncated=True)
    (run,) = samples([run_of([unclear])]).runs
    shown = run["groups"][0]["responses"][0]
    assert (shown["correct"], shown["failed"], shown["truncated"]) == (False, True, True)
    assert run["heaviest"] == {"correct": [], "incorrect": []}


def test_nothing_to_tell_apart_has_a_scale_of_zero_and_an_empty_response_is_shown():
    flat = replace(response(0, 1.0), token_entropy=[0.0] * 3, shaped_rewards=[0.0] * 3, advantages=[0.0] * 3)
    empty = replace(response(0, 0.0), response="", tokens=(), token_entropy=(), shaped_rewards=(), advantages=())
    (run,) = samples([run_of([flat, empty])]).runs
    assert run["scales"] == {"entropy": 0, "shaped": 0, "advantage": 0}
    assert run["groups"][0]["responses"][1]["length"] == 0


def test_long_responses_are_cut_before_groups_are_left_out(monkeypatch):
    long = [response(0, 1.0, tokens=("a", "b", "c") * 400), response(0, 0.0, tokens=("a", "b", "c") * 400)]
    monkeypatch.setattr(report_samples, "MAX_BYTES", 64 * 2 * 600 * 26)
    cut = samples([run_of(*[long] * 64)])
    assert cut.remarks == ()
    assert {len(each["tokens"]) for group in cut.runs[0]["groups"] for each in group["responses"]} == {512}
    assert cut.runs[0]["groups"][0]["responses"][0]["length"] == 1200
    monkeypatch.setattr(report_samples, "MAX_BYTES", 8 * 2 * 200 * 26)
    fewer = samples([run_of(*[long] * 64)])
    assert fewer.remarks == ("run: 8 of 64 sampled groups are shown, to keep this page small.",)
    assert [group["step"] for group in fewer.runs[0]["groups"]] == list(range(8, 65, 8))


def test_the_heaviest_tokens_by_hand():
    rows = [record(("a", "b"), [1.0, 0.5], [3.0, -1.0]) for _ in range(5)]
    rows.append(record(("rare",), [2.0], [100.0]))  # once only
    rows.append(record(("a",), [0.0], [9.0], reward=0.0))  # of the other kind
    run = run_of(rows)
    mean = (5 * 3 + 5 * 1 + 100) / 11
    assert heaviest_tokens(run, is_correct=True) == [
        {"token": "a", "weight": round(3 / mean, 3), "count": 5, "entropy": 1.0},
        {"token": "b", "weight": round(1 / mean, 3), "count": 5, "entropy": 0.5},
    ]
    assert heaviest_tokens(run, is_correct=False) == []


def test_entropy_profiles_by_hand():
    rows = [record(("a", "b"), [0.25, 0.5], [1, 1]), record(("a",), [0.75], [1])]
    wrong = [record(("a", "b", "c"), [1.0, 2.0, 3.0], [1, 1, 1], reward=0.0)]
    correct, incorrect = entropy_profiles([run_of(rows, wrong)]).traces
    assert (correct["x"], correct["y"]) == ([1], [0.5])  # one response is not enough at position 2
    assert (incorrect["x"], incorrect["y"]) == ([1, 2, 3], [1.0, 2.0, 3.0])


def test_long_profiles_are_binned():
    rows = [record(("t",) * 200, [float(i // 3) for i in range(200)], [1.0] * 200)] * 12
    figure = entropy_profiles([run_of(rows), run_of(rows, name="other")])
    assert "mean over up to 3 positions" in figure.caption
    assert figure.traces[0]["x"][:3] == [1, 4, 7]
    assert figure.traces[0]["y"] == pytest.approx(range(67))
    assert [trace["name"] for trace in figure.traces] == ["run", "other"]
