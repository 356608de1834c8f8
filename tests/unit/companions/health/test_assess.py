"""Planted runs: each has one thing wrong, and only its sign says so; a sound run is green throughout."""

import math
import re
from pathlib import Path

import pytest

from gtpo_megatron.companions.health.history import Level, worst
from gtpo_megatron.companions.health.signs import assess, in_one_line

SOUND = {
    "policy/entropy_nats": 0.25,
    "policy/kl_old_nats": 0.0,
    "rollout/response_length_tokens": 50.0,
    "rollout/truncated_frac": 0.0,
    "rollout/groups_mixed_frac": 0.8,
    "rollout/reward_failed_count": 0.0,
    "rollout/responses_refused_count": 0.0,
    "rollout/responses_ungraded_count": 0.0,
    "rollout/responses_count": 256.0,
    "optimizer/grad_norm": 0.06,
    "optimizer/skipped_count": 0.0,
    "sync/logprob_gap_scaled": 3e-6,
    "sync/logprob_gap_scaled_limit": 5e-5,
    "timing/step_s": 10.0,
    "timing/rollout_wait_s": 0.5,
    "timing/environment_wait_s": 0.5,
    "health/engine_restarts_count": 0.0,
    "experts/dead_frac": 0.0,
    "experts/load_max_over_mean": 1.4,
}
NUM_STEPS = 20


def evaluated(mean, *, contaminated=None):
    row = {
        "eval/heldout_mean_at_k": mean,
        "eval/heldout_interval_low": mean - 0.02,
        "eval/heldout_interval_high": mean + 0.02,
    }
    return row if contaminated is None else row | {"eval/heldout_contaminated_count": contaminated}


def planted(changes=None, *, accuracies=((0, 0.25), (10, 0.35), (20, 0.45)), contaminated=0.0):
    """A run of 20 steps whose reward rises; ``changes`` maps a metric to its value at a step."""
    measured = {step: evaluated(mean, contaminated=contaminated if step == 0 else None) for step, mean in accuracies}
    rows = [{"step": 0, **measured.get(0, {})}]
    for step in range(1, NUM_STEPS + 1):
        row = {"step": step, "rollout/reward_mean": 0.2 + 0.01 * step, **SOUND, **measured.get(step, {})}
        for name, value in (changes or {}).items():
            row[name] = value(step)
        rows.append(row)
    return rows


def late(bad, good):
    """Good until step 15, bad after it."""
    return lambda step: bad if step > NUM_STEPS - 5 else good


def at(value):
    return lambda _: value


A, R = Level.AMBER, Level.RED
CASES = {
    "entropy collapses": ("entropy", A, {"policy/entropy_nats": late(0.08, 0.25)}),
    "entropy is gone": ("entropy", R, {"policy/entropy_nats": late(0.002, 0.25)}),
    "entropy grows": ("entropy", A, {"policy/entropy_nats": late(0.6, 0.25)}),
    "entropy explodes": ("entropy", R, {"policy/entropy_nats": late(2.0, 0.25)}),
    "a third is cut": ("response length", A, {"rollout/truncated_frac": late(0.3, 0.0)}),
    "most are cut": ("response length", R, {"rollout/truncated_frac": late(0.8, 0.0)}),
    "longer for nothing": (
        "response length",
        A,
        {"rollout/response_length_tokens": late(200.0, 50.0), "rollout/reward_mean": at(0.3)},
    ),
    "runaway": (
        "response length",
        R,
        {"rollout/response_length_tokens": late(500.0, 50.0), "rollout/reward_mean": at(0.3)},
    ),
    "most groups are equal": ("groups without variance", A, {"rollout/groups_mixed_frac": late(0.2, 0.8)}),
    "all groups are equal": ("groups without variance", R, {"rollout/groups_mixed_frac": late(0.0, 0.8)}),
    "the gap nears its limit": ("sampler beside trainer", A, {"sync/logprob_gap_scaled": late(3e-5, 3e-6)}),
    "the gap is beyond its limit": ("sampler beside trainer", R, {"sync/logprob_gap_scaled": late(6e-5, 3e-6)}),
    "one update was skipped": ("skipped updates", A, {"optimizer/skipped_count": lambda step: float(step == 3)}),
    "updates are skipped": ("skipped updates", R, {"optimizer/skipped_count": late(1.0, 0.0)}),
    "the policy jumps": ("divergence", A, {"policy/kl_old_nats": late(0.1, 0.0)}),
    "the policy leaps": ("divergence", R, {"policy/kl_old_nats": late(1.0, 0.0)}),
    "far from the reference": ("divergence", A, {"policy/kl_ref_nats": late(0.5, 0.0)}),
    "beyond the reference": ("divergence", R, {"policy/kl_ref_nats": late(3.0, 0.0)}),
    "a spike": ("gradient norm", A, {"optimizer/grad_norm": lambda step: 1.0 if step == 18 else 0.06}),
    "an explosion": ("gradient norm", R, {"optimizer/grad_norm": lambda step: 60.0 if step == 18 else 0.06}),
    "no number": ("gradient norm", A, {"optimizer/grad_norm": lambda step: None if step == 18 else 0.06}),
    "some without a verdict": ("graders", A, {"rollout/reward_failed_count": late(8.0, 0.0)}),
    "many without a verdict": ("graders", R, {"rollout/reward_failed_count": late(100.0, 0.0)}),
    "held-out responses have no verdict": ("graders", A, {"eval/heldout_failed_count": late(3.0, 0.0)}),
    "some requests are refused": ("refused requests", A, {"rollout/responses_refused_count": late(8.0, 0.0)}),
    "many requests are refused": ("refused requests", R, {"rollout/responses_refused_count": late(100.0, 0.0)}),
    "some episodes are ended ungraded": ("ungraded episodes", A, {"rollout/responses_ungraded_count": late(60.0, 0.0)}),
    "most episodes are ended ungraded": (
        "ungraded episodes",
        R,
        {"rollout/responses_ungraded_count": late(200.0, 0.0)},
    ),
    "the trainer waits": ("waiting for responses", A, {"timing/rollout_wait_s": late(4.0, 0.5)}),
    "the trainer hardly works": ("waiting for responses", R, {"timing/rollout_wait_s": late(8.0, 0.5)}),
    "environments hold steps up": (
        "environment",
        A,
        {"timing/environment_wait_s": late(2.9, 0.5), "timing/rollout_wait_s": late(2.8, 0.5)},
    ),
    "a step is waiting for environments": (  # nothing is sampled ahead: the trainer's wait is not measured
        "environment",
        R,
        {"timing/environment_wait_s": late(6.0, 0.5), "timing/rollout_wait_s": at(None)},
    ),
    "an engine died": ("engines", A, {"health/engine_restarts_count": late(1.0, 0.0)}),
    "engines die": ("engines", R, {"health/engine_restarts_count": late(7.0, 0.0)}),
    "experts starve": ("experts", A, {"experts/dead_frac": late(0.1, 0.0)}),
    "most experts are dead": ("experts", R, {"experts/dead_frac": late(0.6, 0.0)}),
}


def test_a_sound_run_is_green_throughout():
    findings = assess(planted())
    assert len(findings) == 16
    assert worst(findings) == Level.GREEN
    assert in_one_line(findings) == "healthy: all 16 signs are green"


@pytest.mark.parametrize("case", CASES)
def test_one_thing_is_wrong_and_its_sign_alone_says_so(case):
    sign, level, changes = CASES[case]
    findings = assess(planted(changes))
    assert {finding.sign: finding.level for finding in findings if finding.level} == {sign: level}
    assert findings[0].sign == sign, "the worst comes first"
    line = in_one_line(findings)
    assert line.startswith(f"{level.word}: {sign} ({findings[0].seen})")
    assert line.endswith(f"the other {len(findings) - 1} signs are green")


def test_every_sign_is_planted_amber_and_red():
    planted_levels = {(sign, level) for sign, level, _ in CASES.values()}
    others = {"held-out accuracy", "contamination"}  # below
    signs = {finding.sign for finding in assess(planted())} - others
    assert planted_levels == {(sign, level) for sign in signs for level in (A, R)}


@pytest.mark.parametrize(
    ("accuracies", "level"),
    [
        (((0, 0.25), (10, 0.40), (20, 0.39)), Level.GREEN),  # within the noise
        (((0, 0.25), (10, 0.40), (20, 0.33)), Level.AMBER),
        (((0, 0.25), (10, 0.40), (20, 0.20)), Level.RED),
        (((0, 0.25), (20, 0.10)), Level.RED),
    ],
)
def test_accuracy_that_falls_while_the_reward_rises(accuracies, level):
    assert found(assess(planted(accuracies=accuracies)), "held-out accuracy").level == level


def test_environments_that_the_trainer_does_not_wait_for_hold_nothing_up():
    findings = assess(planted({"timing/environment_wait_s": at(9.0)}))
    assert found(findings, "environment").level == Level.GREEN


def test_accuracy_that_falls_with_the_reward_is_no_hacking():
    falling = {"rollout/reward_mean": lambda step: 0.5 - 0.01 * step}
    findings = assess(planted(falling, accuracies=((0, 0.4), (10, 0.4), (20, 0.2))))
    assert found(findings, "held-out accuracy").level == Level.GREEN


@pytest.mark.parametrize(
    ("count", "sizes", "level", "seen"),
    [
        (0.0, {}, Level.GREEN, "none found"),
        (6.0, {}, Level.AMBER, "6 in held-out"),
        (6.0, {"heldout": 100}, Level.AMBER, "6 of 100 in held-out"),
        (6.0, {"heldout": 16}, Level.RED, "6 of 16 in held-out"),
    ],
)
def test_contamination(count, sizes, level, seen):
    finding = found(assess(planted(contaminated=count), sizes), "contamination")
    assert (finding.level, finding.seen) == (level, seen)


def found(findings, sign):
    return next(finding for finding in findings if finding.sign == sign)


def test_too_little_was_measured():
    assert assess([]) == ()
    assert assess([{"step": 0, "eval/heldout_mean_at_k": 0.2}]) == ()
    assert in_one_line(()) == "not assessed yet: no step is finished"
    few = {finding.sign for finding in assess(planted()[:4])}
    assert "entropy" not in few, "three steps have no two ends"
    assert "graders" in few


@pytest.mark.parametrize("bad", [None, "x", math.nan, math.inf, True, [1], 1e300])
def test_damaged_values_are_no_measurement(bad):
    """A file of metrics can hold anything; no sign raises, and none but the gradient's says that a value is missing."""
    names = [name for name in planted()[-1] if name != "step"]
    for name in names:
        rows = planted({name: at(bad)})
        levels = {finding.sign for finding in assess(rows) if finding.level}
        assert levels <= {"gradient norm"}, name


def test_every_sign_has_its_section():
    text = (Path(__file__).parents[4] / "docs" / "health.md").read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^a-z0-9]+", "-", line[3:].lower()).strip("-") for line in text.splitlines() if line.startswith("## ")
    }
    assert {finding.anchor for finding in assess(planted())} <= headings
