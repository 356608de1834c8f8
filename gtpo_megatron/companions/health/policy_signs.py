"""Signs in the policy's behaviour: entropy, lengths, groups, divergence, and rewards that rise where accuracy falls."""

from gtpo_megatron.companions.health.finding import Finding, Level, level_above
from gtpo_megatron.companions.health.history import EDGE_STEPS, History
from gtpo_megatron.observability.measured_sets import interval, labels_among, mean_metric, set_name

ENTROPY_AMBER = (0.4, 2.0)
ENTROPY_RED = (0.15, 4.0)
CUT_AMBER, CUT_RED = 0.2, 0.5
GROWTH_AMBER, GROWTH_RED = 3.0, 6.0
EQUAL_GROUPS_AMBER, EQUAL_GROUPS_RED = 0.7, 0.9
KL_OLD_AMBER, KL_OLD_RED = 0.05, 0.5
KL_REF_AMBER, KL_REF_RED = 0.3, 1.0

ENDS = f"mean of the last {EDGE_STEPS} steps over that of the first {EDGE_STEPS}"


def entropy(history: History) -> Finding | None:
    """Collapse or explosion of the policy's entropy."""
    first, last = history.first_mean("policy/entropy_nats"), history.last_mean("policy/entropy_nats")
    if not first or last is None:
        return None
    ratio = last / first
    level = Level.GREEN
    if not ENTROPY_RED[0] < ratio < ENTROPY_RED[1]:
        level = Level.RED
    elif not ENTROPY_AMBER[0] < ratio < ENTROPY_AMBER[1]:
        level = Level.AMBER
    return Finding(
        sign="entropy",
        anchor="entropy",
        level=level,
        seen=f"{last:.3g} nats, {ratio:.2f} of what it was",
        rule=f"{ENDS}: amber outside {ENTROPY_AMBER[0]:g} to {ENTROPY_AMBER[1]:g}, "
        f"red outside {ENTROPY_RED[0]:g} to {ENTROPY_RED[1]:g}",
    )


def length(history: History) -> Finding | None:
    """Responses that are cut, or grow without reward."""
    cut, tokens = history.last_mean("rollout/truncated_frac"), history.last_mean("rollout/response_length_tokens")
    if cut is None or tokens is None:
        return None
    level, seen = level_above(cut, CUT_AMBER, CUT_RED), f"{tokens:.4g} tokens, {cut:.0%} cut"
    first = history.first_mean("rollout/response_length_tokens")
    rewards = [history.first_mean("rollout/reward_mean"), history.last_mean("rollout/reward_mean")]
    if first and rewards[0] is not None and rewards[1] is not None:
        seen += f", {tokens / first:.2f} of what it was"
        if rewards[1] <= rewards[0]:
            level = max(level, level_above(tokens / first, GROWTH_AMBER, GROWTH_RED))
    return Finding(
        sign="response length",
        anchor="response-length",
        level=level,
        seen=seen,
        rule=f"cut share: amber from {CUT_AMBER:.0%}, red from {CUT_RED:.0%}; {ENDS}, while the reward does not rise: "
        f"amber from {GROWTH_AMBER:g}, red from {GROWTH_RED:g}",
    )


def equal_groups(history: History) -> Finding | None:
    """Groups whose responses all have one reward, which teach nothing."""
    mixed = history.last_mean("rollout/groups_mixed_frac")
    if mixed is None:
        return None
    return Finding(
        sign="groups without variance",
        anchor="groups-without-variance",
        level=level_above(1 - mixed, EQUAL_GROUPS_AMBER, EQUAL_GROUPS_RED),
        seen=f"{1 - mixed:.0%} of the groups",
        rule=f"last {EDGE_STEPS} steps: amber from {EQUAL_GROUPS_AMBER:.0%}, red from {EQUAL_GROUPS_RED:.0%}",
    )


def divergence(history: History) -> Finding | None:
    """How far a step's updates move the policy, and how far it is from its reference."""
    old, reference = history.last_mean("policy/kl_old_nats"), history.last_mean("policy/kl_ref_nats")
    if old is None:
        return None
    level, seen = level_above(old, KL_OLD_AMBER, KL_OLD_RED), f"{old:.2g} nats a token in a step"
    if reference is not None:
        level = max(level, level_above(reference, KL_REF_AMBER, KL_REF_RED))
        seen += f", {reference:.2g} from the reference"
    return Finding(
        sign="divergence",
        anchor="divergence",
        level=level,
        seen=seen,
        rule=f"last {EDGE_STEPS} steps: amber from {KL_OLD_AMBER:g}, red from {KL_OLD_RED:g} nats in a step; "
        f"{KL_REF_AMBER:g} and {KL_REF_RED:g} from the reference",
    )


def held_out(history: History) -> Finding | None:
    """Held-out accuracy that falls while the training reward rises."""
    labels = labels_among(name for row in history.rows for name in row)
    falls = [found for label in labels if (found := _fall(history, label)) is not None]
    if not falls:
        return None
    level, seen = max(falls)
    return Finding(
        sign="held-out accuracy",
        anchor="held-out-accuracy",
        level=level,
        seen=seen,
        rule="below its best by more than half of that measurement's 95% interval, while the reward has risen since: "
        "amber; below what it was before training as well: red",
    )


def _fall(history: History, label: str) -> tuple[Level, str] | None:
    """Level and text of one set; None with fewer than two measurements."""
    points = history.points(mean_metric(label))
    if len(points) < 2:
        return None
    (last_step, last), (best_step, best) = points[-1], max(points[:-1], key=lambda point: point[1])
    row = next(row for row in history.rows if row["step"] == best_step)
    low, high = interval(row, label)
    noise = (high - low) / 2 if high >= low else 0.0
    seen = f"{set_name(label)} {last:.1%} after step {last_step}, best {best:.1%} after step {best_step}"
    rewards = history.points("rollout/reward_mean")
    then = [value for step, value in rewards if step <= max(best_step, EDGE_STEPS)][-EDGE_STEPS:]
    now = [value for _, value in rewards][-EDGE_STEPS:]
    has_risen = bool(then) and sum(now) / len(now) > sum(then) / len(then)
    if not (has_risen and best - last > noise):
        return Level.GREEN, seen
    first_step, first = points[0]
    return (Level.RED if first_step == 0 and last < first - noise else Level.AMBER), seen
