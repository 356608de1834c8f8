"""Estimates of KL(pi || pi_ref) as scalar loops: a token's penalty, its derivative by log pi, a response's sum.

k1, k2, k3: joschu.net/blog/kl-approx.html; arXiv 2402.03300, Eq. 4; 2512.02556, Eq. 7.
"""

import math


def value(kind, new, ref):
    """``kind`` of one token."""
    if kind == "k1":
        return new - ref
    if kind == "k2":
        return 0.5 * (new - ref) ** 2
    return math.exp(ref - new) - (ref - new) - 1


def slope(kind, new, ref):
    """Its derivative by ``new``."""
    if kind == "k1":
        return 1.0
    if kind == "k2":
        return new - ref
    return 1 - math.exp(ref - new)


def penalty(kind, gradient, new, old, ref):
    """Value and derivative of the term in the loss, without its coefficient."""
    if gradient == "estimator":
        return value(kind, new, ref), slope(kind, new, ref)
    ratio = math.exp(new - old)
    return ratio * value(kind, new, ref), ratio * (new - ref)


def of_responses(kind, old, ref):
    """One sum per response: what its reward loses, without the coefficient."""
    return [math.fsum(value(kind, o, r) for o, r in zip(*rows, strict=True)) for rows in zip(old, ref, strict=True)]
