# ruff: noqa: N803, N806 - the paper's symbols
"""GTPO and GRPO-S as scalar loops in the paper's symbols (arXiv 2508.04349). Slow, plain, independent of the package.

Responses are lists of entropies of the policy's own tokens; ``r[i]`` is the raw outcome, ``R[i]`` the length penalty,
``g[i]`` the group. Equal weights are compared as equals (a sum of equal numbers is rounded, so its mean need not be
the number), and a pool is constant if its values differ by rounding only.
"""

import math
from dataclasses import dataclass, field, replace


@dataclass
class Rules:
    formulation: str = "v6"
    base: float = 1.0  # alpha1, beta1
    bonus: float = 0.1  # alpha2, beta2
    kappa: float | None = None
    axis: str = "position"
    geometric: bool = False
    entropy_scope: str = "group"
    advantage_scope: str = "batch"
    pool: str = "joint_zero"
    floor: float = 1e-8
    clip: tuple[float, float] | None = None
    one_sided: str = "zero"
    ddof: int = 0
    eps: float = 0.0
    penalties: list[float] = field(default_factory=list)
    sides: str = "both"
    kept: list[list[bool]] | None = None  # tokens that are compared; the others have share 1
    turns: list[list[int]] | None = None  # of each token, for the axis "turn" and the rewards of turns
    positions: list[list[int]] | None = None  # t of each token, where it is not its place in the response: it branches
    depths: list[list[int]] | None = None  # likewise, for the axis "turn", the turns before each token's on its path
    turn_rewards: list[list[float]] | None = None  # rho[i][k], what turn k of response i earned
    turn_coef: float = 0.0


def mean(values):
    return math.fsum(values) / len(values)


def raised(H, rules):
    """``clamp(H) + floor``; slightly negative entropies count as 0."""
    low, high = rules.clip or (0.0, math.inf)
    return [[min(max(h, low), high) + rules.floor for h in row] for row in H]


def is_kept(rules, i, t):
    return rules.kept is None or rules.kept[i][t]


def shares(H, r, g, rules):
    """``x[i,t]`` on O+ and ``y[j,t]`` on O-."""
    result = []
    for i, row in enumerate(H):
        result.append([])
        for t in range(len(row)):
            if not is_kept(rules, i, t) or (rules.sides != "both" and bool(r[i]) != (rules.sides == "positive")):
                result[i].append(1.0)
                continue
            peers = [k for k in range(len(H)) if r[k] == r[i] and (rules.entropy_scope == "batch" or g[k] == g[i])]
            if rules.positions and rules.axis == "position":
                at = rules.positions
                column = [(k, u) for k in peers for u in range(len(H[k])) if at[k][u] == at[i][t]]
            elif rules.axis == "position":
                column = [(k, t) for k in peers if len(H[k]) > t]
            elif rules.axis == "turn":
                spot = place_in_turn(rules, i, t)
                column = [(k, u) for k in peers for u in range(len(H[k])) if place_in_turn(rules, k, u) == spot]
            elif rules.axis == "response":
                column = [(i, u) for u in range(len(row))]
            else:
                column = [(k, u) for k in peers for u in range(len(H[k]))]
            compared = [H[k][u] for k, u in column if is_kept(rules, k, u)]
            weights = compared if r[i] else [1 / h for h in compared]
            result[i].append(relative(row[t] if r[i] else 1 / row[t], weights, rules.geometric))
    return result


def place_in_turn(rules, i, t):
    """Turn of token ``t`` of response ``i``, and how many tokens of the turn are before it."""
    turns = rules.turns[i]
    return rules.depths[i][t] if rules.depths else turns[t], turns[:t].count(turns[t])


def relative(own, weights, geometric):
    """A weight over the mean of those that it is compared with, itself among them."""
    if all(w == own for w in weights):
        return 1.0
    if geometric:
        return own / math.exp(mean([math.log(w) for w in weights]))
    return own / math.fsum(weights) * len(weights)


def shaped(x, r, rules):
    """The table of formulations, length penalty and rewards of turns included."""
    result = []
    for i, row in enumerate(x):
        result.append([])
        for t, share in enumerate(row):
            if r[i]:
                value = rules.base + rules.bonus * share
                if rules.kappa is not None:
                    value = min(max(value, 1.0), rules.base + rules.base / rules.kappa)
            else:
                value = {"v1": 0.0, "v1_clipped": 0.0, "v2": -share, "v6": -rules.base - rules.bonus * share}[
                    rules.formulation
                ]
            value += rules.penalties[i] if rules.penalties else 0.0
            if rules.turn_coef:
                value += rules.turn_coef * rules.turn_rewards[i][rules.turns[i][t]]
            result[i].append(value)
    return result


def one_sided(r, g, live):
    """Groups all correct or all wrong."""
    return {q for q in set(g) if len({r[i] for i in range(len(r)) if g[i] == q and live[i]}) < 2}


def pools(rewards, r, g, rules):
    """The values that each response's rewards are standardised over; None: its group takes no part."""
    live = [bool(row) for row in rewards]
    dead = one_sided(r, g, live) if rules.one_sided == "zero" else set()
    result = []
    for i in range(len(rewards)):
        if g[i] in dead:
            result.append(None)
            continue
        pool = []
        for k, other in enumerate(rewards):
            if g[k] in dead or (rules.advantage_scope == "group" and g[k] != g[i]):
                continue
            if rules.pool == "combined" or rules.formulation in ("v1", "v1_clipped") or r[k] == r[i]:
                pool += other
            elif rules.pool == "joint_zero":
                pool += [0.0] * len(other)
        result.append(pool)
    return result


def advantages(rewards, r, g, rules):
    """Each token standardised over its pool."""
    return [
        [0.0 if pool is None else standardised(value, pool, rules) for value in row]
        for row, pool in zip(rewards, pools(rewards, r, g, rules), strict=True)
    ]


def deviation(pool, ddof, rounding=1e-12):
    """Standard deviation; 0 if all values are equal but for rounding."""
    if len(pool) <= ddof or all(v == pool[0] for v in pool):
        return 0.0
    center = mean(pool)
    std = math.sqrt(math.fsum((v - center) ** 2 for v in pool) / (len(pool) - ddof))
    return std if std > rounding * max(1.0, *map(abs, pool)) else 0.0


def standardised(value, pool, rules):
    std = deviation(pool, rules.ddof)
    return (value - mean(pool)) / (std + rules.eps) if std else 0.0


def gtpo(H, r, g, rules):
    """Shaped token rewards and token advantages."""
    rewards = shaped(shares(raised(H, rules), r, g, rules), r, rules)
    return rewards, advantages(rewards, r, g, rules)


def grpo_s(H, r, g, rules, *, geometric_sequence=False):
    """Shaped rewards and advantages of responses: the same on one number a response."""
    Hs = []
    for i, row in enumerate(raised(H, rules)):
        kept = [h for t, h in enumerate(row) if is_kept(rules, i, t)] or row
        if not row:
            Hs.append([])
        elif all(h == kept[0] for h in kept):
            Hs.append([kept[0]])
        elif geometric_sequence:
            Hs.append([math.exp(mean([math.log(h) for h in kept]))])
        else:
            Hs.append([mean(kept)])
    whole = replace(rules, kept=None)
    rewards = shaped(shares(Hs, r, g, whole), r, whole)
    return rewards, advantages(rewards, r, g, whole)


def group_relative(rewards, H, g, rules, *, centred_only=False):
    """GRPO's (Dr.GRPO's) advantage of each response; one without tokens is in no group."""
    raw = [reward + (rules.penalties[i] if rules.penalties else 0.0) for i, reward in enumerate(rewards)]
    result = []
    for i in range(len(raw)):
        pool = [raw[k] for k in range(len(raw)) if g[k] == g[i] and H[k]]
        std = deviation(pool, rules.ddof, rounding=2**-22)  # rewards are float32
        if not H[i] or not std:
            result.append(0.0)
        else:
            result.append((raw[i] - mean(pool)) / (1.0 if centred_only else std + rules.eps))
    return raw, result


def entropy_bonus(A, h, coefficient, bound):
    """arXiv 2506.14758."""
    return A + min(coefficient * max(h, 0.0), abs(A) / bound)


def soft_overlong(length, max_tokens, buffer_tokens):
    """[S sec. 4.5.1], with the denominator L1."""
    start = max_tokens - buffer_tokens
    if length <= start:
        return 0.0
    return (start - length) / buffer_tokens if length <= max_tokens else -1.0
