# ruff: noqa: N803, N806, SIM300 - the paper's symbols
"""DPPO's binary divergences and mask as scalar code (arXiv 2602.04879, Eq. 11-14)."""

import math


def divergence(pi, mu, kind):
    """Between the two outcomes "this token" and "another one"."""
    if kind == "tv":
        return abs(pi - mu)
    total = mu * math.log(mu / pi)
    if mu < 1:
        total += (1 - mu) * math.log((1 - mu) / (1 - pi)) if pi < 1 else math.inf
    return total


def mask(pi, mu, A, kind, delta):
    """Eq. 12."""
    r, D = pi / mu, divergence(pi, mu, kind)
    return 0 if (A > 0 and r > 1 and D > delta) or (A < 0 and r < 1 and D > delta) else 1


def gradient(new, sampled, A, *, kind, delta):
    """Of ``sum_t M r A`` by each ``log pi``, which is ``M r A``."""
    rows = zip(new, sampled, A, strict=True)
    return [
        [mask(math.exp(n), math.exp(s), a, kind, delta) * math.exp(n - s) * a for n, s, a in zip(*row, strict=True)]
        for row in rows
    ]
