"""Random batches over all options of credit, degenerate ones first, until the time is up.

    make fuzz                                            # 10 minutes, a fresh seed
    python -m tests.credit_fuzz --minutes 60 --seed 7

Each batch is compared with the scalar loops, and with itself: rows in another order, tokens of somebody else between
its own (NaN, infinities, anything), responses sharded over one to four ranks, empty ones too. Whatever the batch, all
ways must give the same bits, or refuse it alike. On a failure it prints the seed and the smallest batch that still
fails, as Python, and exits with 1.
"""

import argparse
import math
import random
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from gtpo_megatron.algorithms import Credit, assign_credit, prepare_update
from gtpo_megatron.algorithms.sums import Reduction
from gtpo_megatron.config.algorithm import (
    DistillConfig,
    DPPOConfig,
    DrGRPOConfig,
    EAPOConfig,
    EntropyAdvantageConfig,
    GRPOSConfig,
    GTPOConfig,
    REINFORCEPlusPlusConfig,
    RLOOConfig,
    STAREConfig,
)
from gtpo_megatron.config.algorithm.base import NoLengthPenalty, SoftOverlongPenalty
from gtpo_megatron.errors import GTPOError
from tests.credit_cases import LARGEST_TURN_REWARD, TEACHER_SHARE, Case, Rows, draw_case
from tests.faked_ranks import World
from tests.reference import credit as reference
from tests.reference import distill


# ------------------------------------------------------------ what must be the same
@dataclass
class Outcome:
    """What a batch came to, by response and own token; ``refusal`` instead if it was refused."""

    shaped_rewards: Rows
    advantages: Rows
    selection: Rows
    row_weights: list[float]
    metrics: dict[str, float]
    refusal: str = ""


def by_token(matrix: Tensor | None, mask: Tensor) -> Rows:
    if matrix is None:
        return []
    assert not bool(torch.where(mask, False, matrix != 0).any()), "foreign tokens have a value"
    return [row[own].tolist() for row, own in zip(matrix, mask, strict=True)]


def run(case: Case, arguments: dict[str, Any], reduction: Reduction) -> Outcome:
    """Credit and selection of the rows given."""
    mask = arguments["response_mask"]
    try:
        credit: Credit = assign_credit(case.config, **arguments, reduction=reduction)
    except GTPOError as error:
        return Outcome([], [], [], [], {}, refusal=type(error).__name__)
    of_credit = ("rewards", "shaped_tokens", "turn_rewards", "teacher_logprobs")
    rest = {k: v for k, v in arguments.items() if k not in of_credit}
    sampled = rest["old_logprobs"]  # DPPO wants the sampler's
    update = prepare_update(
        case.config, advantages=credit.advantages, rollout_logprobs=sampled, **rest, reduction=reduction
    )
    return Outcome(
        by_token(credit.shaped_rewards, mask),
        by_token(credit.advantages, mask),
        by_token(update.token_selection, mask),
        update.row_weights.tolist(),
        credit.metrics,
    )


def differences(whole: Outcome, part: Outcome, rows: list[int]) -> Iterator[str]:
    """Where a part, which holds ``rows``, is not the same bit for bit."""
    if whole.refusal != part.refusal:
        yield f"refused as {part.refusal!r} instead of {whole.refusal!r}"
    elif not whole.refusal:
        for field in fields(Outcome):
            wanted, found = getattr(whole, field.name), getattr(part, field.name)
            if field.name not in ("metrics", "refusal") and wanted:
                wanted = [wanted[i] for i in rows]
            if wanted != found:
                yield f"{field.name}: {found} instead of {wanted}"


def problem_of(case: Case, draw: random.Random) -> str | None:
    """What is wrong with the package's answer to a case; None if nothing is."""
    everyone = list(range(len(case.rewards)))
    whole = run(case, case.arguments(draw, most_holes=0), Reduction())
    if not whole.refusal:
        for rows in (whole.shaped_rewards, whole.advantages, [list(whole.metrics.values())]):
            if not all(math.isfinite(value) for row in rows for value in row):
                return f"not finite: {rows}"
        for text in unlike_the_loops(case, whole):
            return f"unlike the scalar loops: {text}"
    order = draw.sample(everyone, len(everyone))
    moved = case.rows(order)
    for text in differences(whole, run(moved, moved.arguments(draw, most_holes=4), Reduction()), order):
        return f"in another order, with holes: {text}"
    size = draw.randint(1, 4)
    dealt: list[list[int]] = [[] for _ in range(size)]
    holders = draw.sample(range(size), draw.randint(1, size))
    for row in order:
        dealt[draw.choice(holders)].append(row)
    shards = [case.rows(rows) for rows in dealt]
    tensors = [shard.arguments(draw, most_holes=draw.choice([0, 3])) for shard in shards]
    results = World(size).run(lambda reduction: run(shards[reduction.rank], tensors[reduction.rank], reduction))
    for rank in range(size):
        for text in differences(whole, results[rank], dealt[rank]):
            return f"rank {rank} of {size} with the rows {dealt[rank]} of {dealt}: {text}"
    return None


# ------------------------------------------------------------ the scalar loops
def reference_rules(config: GTPOConfig | GRPOSConfig, **extra: Any) -> reference.Rules:
    """The options of a configuration, as the loops take them."""
    is_gtpo = isinstance(config, GTPOConfig)
    return reference.Rules(
        formulation=config.formulation,
        base=config.alpha1 if is_gtpo else config.beta1,
        bonus=config.alpha2 if is_gtpo else config.beta2,
        kappa=config.kappa,
        axis=config.entropy_axis if is_gtpo else "position",
        geometric=config.entropy_mean == "geometric",
        entropy_scope=config.entropy_scope,
        advantage_scope=config.advantage_scope,
        pool=config.advantage_pool,
        floor=config.entropy_floor,
        clip=config.entropy_clip,
        one_sided=config.one_sided_groups,
        ddof=config.std_ddof,
        eps=config.std_eps,
        sides=getattr(config, "shaped_sides", "both"),
        turn_coef=config.turn_reward_coef if is_gtpo else 0.0,
        **extra,
    )


def expected(case: Case) -> tuple[Rows, Rows, list[list[float] | None]] | None:
    """Shaped rewards, advantages and the pool of each response, by the loops; None: they do not know the options."""
    config = case.config
    correct = [float(reward >= config.success_threshold) for reward in case.rewards]
    penalty = config.length_penalty
    penalties: list[float] = []
    if isinstance(penalty, SoftOverlongPenalty):
        penalties = [
            reference.soft_overlong(len(row), penalty.max_tokens, penalty.buffer_tokens)
            if penalty.applies_to == "all" or correct[i]
            else 0.0
            for i, row in enumerate(case.entropies)
        ]
    elif not isinstance(penalty, NoLengthPenalty):
        return None
    if isinstance(config, GTPOConfig | GRPOSConfig):
        weights = {
            "entropy": case.entropies,
            "uniform": [[1.0] * len(row) for row in case.entropies],
            "surprisal": [[-value for value in row] for row in case.old_logprobs],
        }.get(getattr(config, "weight_source", "entropy"))
        if weights is None or any(h + config.entropy_floor <= 0 for row in weights for h in row):
            return None
        rules = reference_rules(
            config, penalties=penalties, kept=case.kept, turns=case.turns, turn_rewards=case.turn_rewards
        )
        if isinstance(config, GTPOConfig):
            rewards, advantages = reference.gtpo(weights, correct, case.groups, rules)
            return rewards, advantages, reference.pools(rewards, correct, case.groups, rules)
        is_geometric = config.sequence_entropy_mean == "geometric"
        own, earned = reference.grpo_s(weights, correct, case.groups, rules, geometric_sequence=is_geometric)
        pools = reference.pools(own, correct, case.groups, rules)
        return *(spread_over(column, case.entropies) for column in (own, earned)), pools
    if isinstance(config, RLOOConfig | REINFORCEPlusPlusConfig | EAPOConfig | STAREConfig):
        return None
    rules = reference.Rules(ddof=config.std_ddof, eps=config.std_eps, penalties=penalties)
    is_centred = isinstance(config, DrGRPOConfig | DPPOConfig)
    raw, single = reference.group_relative(case.rewards, case.entropies, case.groups, rules, centred_only=is_centred)
    pools = [
        [raw[k] for k in range(len(raw)) if case.groups[k] == case.groups[i] and case.entropies[k]]
        for i in range(len(raw))
    ]
    advantages = spread_over([[a] for a in single], case.entropies)
    if isinstance(config, DistillConfig):
        teacher = [[TEACHER_SHARE * value for value in row] for row in case.old_logprobs]
        weights = distill.weights(
            case.entropies, case.groups, config.entropy_coef, config.entropy_axis, turns=case.turns
        )
        coefs = {"teacher_coef": config.teacher_coef, "reward_coef": config.reward_coef}
        earned, advantages = (
            distill.advantages(case.old_logprobs, teacher, weights, part, **coefs) for part in (raw, single)
        )
        return earned, advantages, pools
    if isinstance(config, EntropyAdvantageConfig):
        advantages = [
            [reference.entropy_bonus(a, h, config.coefficient, config.bound) for a, h in zip(left, right, strict=True)]
            for left, right in zip(advantages, case.entropies, strict=True)
        ]
    return spread_over([[value] for value in raw], case.entropies), advantages, pools


def spread_over(single: Rows, entropies: Rows) -> Rows:
    """One value a response, on each of its tokens."""
    return [(row * len(tokens))[: len(tokens)] for row, tokens in zip(single, entropies, strict=True)]


SHARE = 2.0**-30
"""Relative error of a share: weights have 32 significant bits."""
TINY = 1e-37
"""Smaller float32 numbers have fewer digits."""
SHARE_OF_LOGS = 2.0**-22
"""Logarithms of weights have 32 significant bits, whatever their size, up to 700."""


def unlike_the_loops(case: Case, found: Outcome) -> Iterator[str]:
    """Where credit is further from the loops than rounding explains; a narrow pool magnifies what rounding left."""
    wanted = expected(case)
    if wanted is None:
        return
    is_geometric = "geometric" in (
        getattr(case.config, "entropy_mean", None),
        getattr(case.config, "sequence_entropy_mean", None),
    )
    noise = SHARE_OF_LOGS if is_geometric else SHARE
    for i, (rewards, advantages, pool) in enumerate(zip(*wanted, strict=True)):
        # a length penalty of up to 1, or a turn's reward, may cancel what it is added to, but not its rounding
        size = max(map(abs, pool or [0.0])) + (not isinstance(case.config.length_penalty, NoLengthPenalty))
        size += getattr(case.config, "turn_reward_coef", 0.0) * LARGEST_TURN_REWARD
        std = reference.deviation(pool, case.config.std_ddof) if pool else 0.0
        for t, (reward, advantage) in enumerate(zip(rewards, advantages, strict=True)):
            got, earned = found.shaped_rewards[i][t], found.advantages[i][t]
            if not math.isclose(got, reward, rel_tol=1e-6 + noise, abs_tol=1e-6 * min(1.0, size) + noise * size + TINY):
                yield f"shaped_rewards[{i}][{t}] = {got}, expected {reward}"
            if std == 0 and not isinstance(case.config, EntropyAdvantageConfig | DistillConfig):
                if earned != 0:
                    yield f"advantages[{i}][{t}] = {earned}, expected exactly 0: the pool {pool} is constant"
                continue
            slack = 1e-6 if std == 0 else 1e-6 + 8 * noise * size / std
            if abs(earned - advantage) > slack * (1 + abs(advantage)):
                yield f"advantages[{i}][{t}] = {earned}, expected {advantage} (std {std}, slack {slack})"


# ------------------------------------------------------------ shrinking
def simpler(case: Case) -> Iterator[Case]:
    """Cases with less in them."""
    everyone = range(len(case.rewards))
    for i in everyone:
        yield case.rows([k for k in everyone if k != i])
    tokens = [(i, t) for i in everyone for t in range(len(case.entropies[i]))]
    for place in tokens:
        yield replace(
            case,
            entropies=without(case.entropies, *place),
            old_logprobs=without(case.old_logprobs, *place),
            kept=None if case.kept is None else without(case.kept, *place),
            turns=None if case.turns is None else without(case.turns, *place),
        )
    if case.kept is not None:
        yield replace(case, kept=None)
    for field in fields(case.config):
        default = getattr(type(case.config)(), field.name)
        if getattr(case.config, field.name) != default:
            try:
                yield replace(case, config=replace(case.config, **{field.name: default}))
            except GTPOError:
                continue  # options that hang together
    for i, t in tokens:
        if case.entropies[i][t] != 1.0:
            rows = [list(row) for row in case.entropies]
            rows[i][t] = 1.0
            yield replace(case, entropies=rows)


def without(rows: Rows, i: int, t: int) -> Rows:
    return [row[:t] + row[t + 1 :] if k == i else row for k, row in enumerate(rows)]


def smallest(case: Case, seed: int) -> Case:
    """The smallest case that still has a problem, as far as single steps lead; any of ten drawings counts."""
    deadline = time.monotonic() + 60
    shrinks = True
    while shrinks and time.monotonic() < deadline:
        shrinks = False
        for candidate in simpler(case):
            if any(_fails(candidate, seed + extra) for extra in range(10)):
                case, shrinks = candidate, True
                break
    return case


def _fails(case: Case, seed: int) -> bool:
    try:
        return problem_of(case, random.Random(seed)) is not None
    except Exception:  # noqa: BLE001 - a crash is a problem too
        return True


def tried(seed: int) -> tuple[Case, str | None]:
    """The case of a seed, and what is wrong with it."""
    draw = random.Random(seed)
    case = draw_case(draw)
    try:
        return case, problem_of(case, random.Random(seed))
    except Exception as error:  # noqa: BLE001 - a crash is a finding
        return case, f"{type(error).__name__}: {error}"


def main() -> int:
    """Tries batches until the time is up; 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="the first; each batch takes the next one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    first = secrets.randbelow(2**40) if options.seed is None else options.seed
    print(f"seed {first}", flush=True)
    end = time.monotonic() + 60 * options.minutes
    count, next_report = 0, time.monotonic() + 60
    while time.monotonic() < end:
        case, problem = tried(first + count)
        if problem is not None:
            print(f"FAILED with --seed {first + count}: {problem}\nas drawn: {case!r}", flush=True)
            case = smallest(case, first + count)
            print(f"smallest: {case!r}", flush=True)
            for extra in range(10):
                if _fails(case, first + count + extra):
                    print(problem_of(case, random.Random(first + count + extra)))
                    break
            return 1
        count += 1
        if time.monotonic() > next_report:
            next_report += 60
            print(f"{count:,} batches, nothing found", flush=True)
    print(f"{count:,} batches over all options, nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
