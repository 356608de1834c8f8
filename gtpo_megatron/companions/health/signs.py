"""The signs of a run, and the assessment of all of them: one finding each."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from gtpo_megatron.companions.health.history import EDGE_STEPS, Finding, History, Level, level_above
from gtpo_megatron.observability.measured_sets import interval, labels_among, mean_metric, set_name
from gtpo_megatron.run_folder.metrics_file import finite

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


LIMIT_AMBER, LIMIT_RED = 0.5, 1.0
SKIPPED_RED = 3
NORM_AMBER, NORM_RED = 10.0, 100.0
DEAD_AMBER, DEAD_RED = 0.05, 0.3

_LIMIT = "_limit"


def mismatch(history: History) -> Finding | None:
    """Sampler's and trainer's log-probs against the limits at which the run stops."""
    shares = [
        (value / limit, name.removesuffix(_LIMIT).removeprefix("sync/"))
        for row in history.recent
        for name in row
        if name.startswith("sync/") and name.endswith(_LIMIT)
        if (limit := finite(row[name])) and (value := finite(row.get(name.removesuffix(_LIMIT)))) is not None
    ]
    if not shares:
        return None
    share, name = max(shares)
    return Finding(
        sign="sampler beside trainer",
        anchor="sampler-beside-trainer",
        level=level_above(share, LIMIT_AMBER, LIMIT_RED),
        seen=f"{name} at {share:.0%} of its limit",
        rule=f"last {EDGE_STEPS} steps, the figure closest to its limit: amber from {LIMIT_AMBER:.0%}, "
        f"red from {LIMIT_RED:.0%}, where the run stops",
    )


def skipped(history: History) -> Finding | None:
    """Updates that were left out, because their gradient was not finite."""
    total = history.total("optimizer/skipped_count")
    recent = history.total("optimizer/skipped_count", recent=True)
    if total is None or recent is None:
        return None
    level = Level.RED if recent >= SKIPPED_RED else Level.AMBER if total else Level.GREEN
    return Finding(
        sign="skipped updates",
        anchor="skipped-updates",
        level=level,
        seen=f"{total:.0f}, of them {recent:.0f} in the last {EDGE_STEPS} steps",
        rule=f"any: amber; {SKIPPED_RED} or more in the last {EDGE_STEPS} steps: red",
    )


def gradient_norm(history: History) -> Finding | None:
    """Spikes of the gradient's norm."""
    middle = history.middle("optimizer/grad_norm")
    recent = [row["optimizer/grad_norm"] for row in history.recent if "optimizer/grad_norm" in row]
    if middle is None or not recent:
        return None
    values = [value for norm in recent if (value := finite(norm)) is not None]
    ratio = max(values, default=0.0) / middle if middle else 0.0
    level = level_above(ratio, NORM_AMBER, NORM_RED)
    seen = f"at most {ratio:.1f} of the median {middle:.2g}"
    if len(values) < len(recent):
        level, seen = max(level, Level.AMBER), f"{seen}; {len(recent) - len(values)} not finite"
    return Finding(
        sign="gradient norm",
        anchor="gradient-norm",
        level=level,
        seen=seen,
        rule=f"largest of the last {EDGE_STEPS} steps over the median of all: amber from {NORM_AMBER:g} or if one is "
        f"not finite, red from {NORM_RED:g}",
    )


def experts(history: History) -> Finding | None:
    """Experts that get no token; of a mixture of experts only."""
    dead, load = history.last_mean("experts/dead_frac"), history.last_mean("experts/load_max_over_mean")
    if dead is None or load is None:
        return None
    return Finding(
        sign="experts",
        anchor="experts",
        level=level_above(dead, DEAD_AMBER, DEAD_RED),
        seen=f"{dead:.1%} without a token, the fullest at {load:.1f} of the mean",
        rule=f"share without a token in the last {EDGE_STEPS} steps: amber from {DEAD_AMBER:.0%}, "
        f"red from {DEAD_RED:.0%}",
    )


FAILED_AMBER, FAILED_RED = 0.01, 0.1
REFUSED_AMBER, REFUSED_RED = 0.01, 0.1
UNGRADED_AMBER, UNGRADED_RED = CUT_AMBER, CUT_RED
CONTAMINATED_RED = 0.1
WAIT_AMBER, WAIT_RED = 0.3, 0.6
ENVIRONMENT_AMBER, ENVIRONMENT_RED = 0.25, 0.5
RESTARTS_RED = 5

_CONTAMINATED = "_contaminated_count"


def graders(history: History) -> Finding | None:
    """Responses without a verdict, which take no part in the update, and in a held-out set count as wrong."""
    failed = history.total("rollout/reward_failed_count", recent=True)
    responses = history.total("rollout/responses_count", recent=True)
    if failed is None or not responses:
        return None
    level, seen = (
        level_above(failed / responses, FAILED_AMBER, FAILED_RED),
        f"{failed:.0f} of {responses:.0f} responses",
    )
    for label in labels_among(name for row in history.rows for name in row):
        if (values := history.values(f"eval/{label}_failed_count")) and values[-1]:
            level, seen = (
                max(level, Level.AMBER),
                f"{seen}, {values[-1]:.0f} in the last measurement of {set_name(label)}",
            )
    return Finding(
        sign="graders",
        anchor="graders",
        level=level,
        seen=f"{seen} without a verdict",
        rule=f"last {EDGE_STEPS} steps: amber from {FAILED_AMBER:.0%}, or if one of a held-out set has none, which "
        f"counts as wrong; red from {FAILED_RED:.0%}",
    )


def refusals(history: History) -> Finding | None:
    """Episodes of agents in which a request was refused, whether the agent could go on or not."""
    refused = history.total("rollout/responses_refused_count", recent=True)
    responses = history.total("rollout/responses_count", recent=True)
    if refused is None or not responses:
        return None
    return Finding(
        sign="refused requests",
        anchor="refused-requests",
        level=level_above(refused / responses, REFUSED_AMBER, REFUSED_RED),
        seen=f"in {refused:.0f} of {responses:.0f} episodes",
        rule=f"last {EDGE_STEPS} steps: amber from {REFUSED_AMBER:.0%}, red from {REFUSED_RED:.0%}",
    )


def ungraded(history: History) -> Finding | None:
    """Episodes whose reward is 0 because a limit ended them before they were graded."""
    count = history.total("rollout/responses_ungraded_count", recent=True)
    responses = history.total("rollout/responses_count", recent=True)
    if count is None or not responses:
        return None
    return Finding(
        sign="ungraded episodes",
        anchor="ungraded-episodes",
        level=level_above(count / responses, UNGRADED_AMBER, UNGRADED_RED),
        seen=f"{count:.0f} of {responses:.0f} were ended by a limit, with a reward of 0",
        rule=f"last {EDGE_STEPS} steps: amber from {UNGRADED_AMBER:.0%}, red from {UNGRADED_RED:.0%}",
    )


def contamination(history: History, num_problems: Mapping[str, int]) -> Finding | None:
    """Held-out problems that are trained on too.

    Args:
        history: of the run.
        num_problems: problems of each held-out set, by its label, as far as known.
    """
    counts = {
        name.removeprefix("eval/").removesuffix(_CONTAMINATED): count
        for row in history.rows
        for name in row
        if name.startswith("eval/") and name.endswith(_CONTAMINATED)
        if (count := finite(row[name])) is not None
    }
    if not counts:
        return None
    found = {label: count for label, count in counts.items() if count}
    is_many = any(count >= CONTAMINATED_RED * num_problems.get(label, float("inf")) for label, count in found.items())
    texts = []
    for label, count in found.items():
        of = f" of {num_problems[label]}" if label in num_problems else ""
        texts.append(f"{count:.0f}{of} in {set_name(label)}")
    return Finding(
        sign="contamination",
        anchor="contamination",
        level=Level.RED if is_many else Level.AMBER if found else Level.GREEN,
        seen=", ".join(texts) or "none found",
        rule=f"a held-out problem that is trained on: amber; {CONTAMINATED_RED:.0%} of a set: red",
    )


def waiting(history: History) -> Finding | None:
    """Time in which the trainer waits for responses, where sampling runs beside it."""
    shares = [
        wait / step
        for row in history.recent
        if (wait := finite(row.get("timing/rollout_wait_s"))) is not None and (step := finite(row.get("timing/step_s")))
    ]
    if not shares:
        return None
    share = median(shares)
    return Finding(
        sign="waiting for responses",
        anchor="waiting-for-responses",
        level=level_above(share, WAIT_AMBER, WAIT_RED),
        seen=f"{share:.0%} of a step",
        rule=f"median of the last {EDGE_STEPS} steps: amber from {WAIT_AMBER:.0%}, red from {WAIT_RED:.0%}",
    )


def environment(history: History) -> Finding | None:
    """Time of a step that environments cost: an engine samples nothing until they answer, and the trainer waits."""
    shares = []
    for row in history.recent:
        idle, step = finite(row.get("timing/environment_wait_s")), finite(row.get("timing/step_s"))
        if idle is not None and step:
            wait = finite(row.get("timing/rollout_wait_s"))  # None: nothing is sampled beside training
            shares.append((idle if wait is None else min(idle, wait)) / step)
    if not shares:
        return None
    share = median(shares)
    return Finding(
        sign="environment",
        anchor="environment",
        level=level_above(share, ENVIRONMENT_AMBER, ENVIRONMENT_RED),
        seen=f"{share:.0%} of a step waits for environments",
        rule=f"median of the last {EDGE_STEPS} steps: amber from {ENVIRONMENT_AMBER:.0%}, "
        f"red from {ENVIRONMENT_RED:.0%}, more than all else takes",
    )


def engines(history: History) -> Finding | None:
    """Engines that died and were replaced."""
    restarts = history.values("health/engine_restarts_count")
    if not restarts:
        return None
    most = max(restarts)
    return Finding(
        sign="engines",
        anchor="engines",
        level=Level.RED if most >= RESTARTS_RED else Level.AMBER if most else Level.GREEN,
        seen=f"{most:.0f} replaced since a start",
        rule=f"any: amber; {RESTARTS_RED} or more: red",
    )


_SIGNS = (
    entropy,
    length,
    equal_groups,
    divergence,
    held_out,
    mismatch,
    skipped,
    gradient_norm,
    experts,
    graders,
    refusals,
    ungraded,
    waiting,
    environment,
    engines,
)


def assess(rows: Sequence[Mapping[str, Any]], num_problems: Mapping[str, int] | None = None) -> tuple[Finding, ...]:
    """One finding for each sign that the run has measured, the worst first.

    Args:
        rows: of ``metrics.jsonl``, by ascending step; also of a run that is under way.
        num_problems: problems of each held-out set, by its label, as far as known.
    """
    history = History(rows)
    found = [sign(history) for sign in _SIGNS] + [contamination(history, num_problems or {})]
    return tuple(sorted((finding for finding in found if finding is not None), key=lambda finding: -finding.level))


def in_one_line(findings: Sequence[Finding]) -> str:
    """``healthy: all 11 signs are green``, or what is not green."""
    bad = [finding for finding in findings if finding.level > Level.GREEN]
    if not findings:
        return "not assessed yet: no step is finished"
    if not bad:
        return f"healthy: all {len(findings)} signs are green"
    listed = "; ".join(f"{finding.level.word}: {finding.sign} ({finding.seen})" for finding in bad)
    return f"{listed}; the other {len(findings) - len(bad)} signs are green"
