# ruff: noqa: N803 - the paper's symbols
"""GRPO's advantages as scalar loops (arXiv 2402.03300), which several others start from."""

import math


def standardised(values):
    """Minus the mean, over the population's std; zeros where all are equal."""
    center = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((v - center) ** 2 for v in values) / len(values))
    return [(v - center) / std if std > 1e-12 else 0.0 for v in values]


def advantages(H, r, g):
    """One value a response with tokens, relative to its group; None for the others."""
    result = [None] * len(H)
    for group in set(g):
        rows = [i for i in range(len(H)) if g[i] == group and H[i]]
        if rows:
            for i, value in zip(rows, standardised([r[i] for i in rows]), strict=True):
                result[i] = value
    return result
