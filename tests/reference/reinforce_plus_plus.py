# ruff: noqa: N803 - the paper's symbols
"""REINFORCE++ as scalar loops (arXiv 2501.03262) without its KL term."""

import math


def advantages(H, r, g, *, baseline, by_tokens):
    """Eq. 4 to 7: rewards, or rewards minus their group's mean, standardised over the batch; on every token."""
    live = [i for i, row in enumerate(H) if row]
    base = {}
    for i in live:
        group = [r[j] for j in live if g[j] == g[i]]
        base[i] = r[i] - math.fsum(group) / len(group) if baseline == "group" else r[i]
    pool = [base[i] for i in live for _ in (H[i] if by_tokens else [0])]
    if not pool:
        return [[] for _ in H]
    center = math.fsum(pool) / len(pool)
    std = math.sqrt(math.fsum((b - center) ** 2 for b in pool) / len(pool))
    return [[(base[i] - center) / std if std > 1e-12 else 0.0] * len(row) if row else [] for i, row in enumerate(H)]
