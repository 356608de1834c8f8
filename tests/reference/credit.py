# ruff: noqa: N803, N806 - the paper's symbols
"""GTPO and GRPO-S as scalar loops in the paper's symbols (arXiv 2508.04349). Slow, plain, independent of the package.

Responses are lists of entropies; ``r[i]`` is the raw outcome, ``R[i]`` the length penalty, ``g[i]`` the group.
"""

import math
from dataclasses import dataclass, field


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


def mean(values):
    return math.fsum(values) / len(values)


def raised(H, rules):
    """``clamp(H) + floor``; slightly negative entropies count as 0."""
    low, high = rules.clip or (0.0, math.inf)
    return [[min(max(h, low), high) + rules.floor for h in row] for row in H]


def shares(H, r, g, rules):
    """``x[i,t]`` on O+ and ``y[j,t]`` on O-."""
    result = []
    for i, row in enumerate(H):
        result.append([])
        for t in range(len(row)):
            peers = [k for k in range(len(H)) if r[k] == r[i] and (rules.entropy_scope == "batch" or g[k] == g[i])]
            if rules.axis == "position":
                column = [H[k][t] for k in peers if len(H[k]) > t]
            elif rules.axis == "response":
                column = row
            else:
                column = [h for k in peers for h in H[k]]
            weights = column if r[i] else [1 / h for h in column]
            own = row[t] if r[i] else 1 / row[t]
            if rules.geometric:
                result[i].append(own / math.exp(mean([math.log(w) for w in weights])))
            else:
                result[i].append(own / math.fsum(weights) * len(weights))
    return result


def shaped(x, r, rules):
    """The table of formulations, length penalty included."""
    result = []
    for i, row in enumerate(x):
        result.append([])
        for share in row:
            if r[i]:
                value = rules.base + rules.bonus * share
                if rules.kappa is not None:
                    value = min(max(value, 1.0), rules.base + rules.base / rules.kappa)
            else:
                value = {"v1": 0.0, "v1_clipped": 0.0, "v2": -share, "v6": -rules.base - rules.bonus * share}[
                    rules.formulation
                ]
            result[i].append(value + (rules.penalties[i] if rules.penalties else 0.0))
    return result


def one_sided(r, g, live):
    """Groups all correct or all wrong."""
    return {q for q in set(g) if len({r[i] for i in range(len(r)) if g[i] == q and live[i]}) < 2}


def advantages(rewards, r, g, rules):
    """Each token standardised over its pool."""
    live = [bool(row) for row in rewards]
    dead = one_sided(r, g, live) if rules.one_sided == "zero" else set()
    result = []
    for i, row in enumerate(rewards):
        if g[i] in dead:
            result.append([0.0] * len(row))
            continue
        pool = []
        for k, other in enumerate(rewards):
            if g[k] in dead or (rules.advantage_scope == "group" and g[k] != g[i]):
                continue
            if rules.pool == "combined" or rules.formulation in ("v1", "v1_clipped") or r[k] == r[i]:
                pool += other
            elif rules.pool == "joint_zero":
                pool += [0.0] * len(other)
        result.append([standardised(value, pool, rules) for value in row])
    return result


def standardised(value, pool, rules):
    if len(pool) <= rules.ddof:
        return 0.0
    center = mean(pool)
    std = math.sqrt(math.fsum((v - center) ** 2 for v in pool) / (len(pool) - rules.ddof))
    if std <= 1e-12 * max(1.0, *map(abs, pool)):
        return 0.0
    return (value - center) / (std + rules.eps)


def gtpo(H, r, g, rules):
    """Shaped token rewards and token advantages."""
    rewards = shaped(shares(raised(H, rules), r, g, rules), r, rules)
    return rewards, advantages(rewards, r, g, rules)


def grpo_s(H, r, g, rules, *, geometric_sequence=False):
    """Shaped rewards and advantages of responses: the same on one number a response."""
    Hs = []
    for row in raised(H, rules):
        if not row:
            Hs.append([])
        elif geometric_sequence:
            Hs.append([math.exp(mean([math.log(h) for h in row]))])
        else:
            Hs.append([mean(row)])
    rewards = shaped(shares(Hs, r, g, rules), r, rules)
    return rewards, advantages(rewards, r, g, rules)
