# ruff: noqa: N803 - the paper's symbols
"""Objectives as scalar loops; each returns ``J`` of the paper, to be maximised."""

import math


def clipped(w, A, low, high):
    return min(w * A, min(max(w, 1 - low), 1 + high) * A)


def token_mean(new, old, A, low, high):
    """[S 4, S 16, I 7]."""
    terms = [
        clipped(math.exp(n - o), a, low, high)
        for rows in zip(new, old, A, strict=True)
        for n, o, a in zip(*rows, strict=True)
    ]
    return sum(terms) / len(terms)


def sequence_mean(new, old, A, low, high, *, geometric):
    """[S 7, S 18, I 10]; ``A[i]`` is the response's."""
    total = 0.0
    for n, o, a in zip(new, old, A, strict=True):
        logs = [x - y for x, y in zip(n, o, strict=True)]
        w = math.exp(sum(logs) / len(logs)) if geometric else sum(map(math.exp, logs)) / len(logs)
        total += clipped(w, a, low, high)
    return total / len(new)


def group_token_mean(new, old, A, g, low, high):
    """Mean over groups of each group's token mean."""
    means = []
    for q in sorted(set(g)):
        rows = [i for i in range(len(g)) if g[i] == q and new[i]]
        if rows:
            means.append(token_mean([new[i] for i in rows], [old[i] for i in rows], [A[i] for i in rows], low, high))
    return sum(means) / len(means)
