# ruff: noqa: N803, N806 - the paper's symbols
"""EAPO as scalar loops (arXiv 2604.11056v1, Eq. 6-7)."""

import math

from tests.reference import grpo


def advantages(H, r, g, *, alpha, phi):
    """``A + alpha sign(A) clip(z, -|A|/phi, |A|/phi)``, ``z`` being the entropy's score among its group's tokens."""
    A = grpo.advantages(H, r, g)
    result = []
    for i, row in enumerate(H):
        entropies = [h for k, other in enumerate(H) if g[k] == g[i] for h in other]
        scores = dict(zip(entropies, grpo.standardised(entropies), strict=True)) if entropies else {}
        result.append([])
        for h in row:
            limit = abs(A[i]) / phi
            sign = math.copysign(1, A[i]) if A[i] else 0
            result[i].append(A[i] + alpha * sign * min(max(scores[h], -limit), limit))
    return result
