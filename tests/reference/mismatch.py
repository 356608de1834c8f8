"""Figures of the mismatch as scalar loops over plain lists of log-probs."""

import math


def gaps(trainer, sampler):
    """``|log pi_trainer - log pi_sampler|`` of every token."""
    return [abs(ours - theirs) for ours, theirs in zip(trainer, sampler, strict=True)]


def mean(values):
    return math.fsum(values) / len(values)


def kl(trainer, sampler, limit=20.0):
    """The k3 estimate, of differences within +-limit."""
    terms = []
    for ours, theirs in zip(trainer, sampler, strict=True):
        d = max(-limit, min(limit, ours - theirs))
        terms.append(math.expm1(d) - d)
    return mean(terms)


def scaled(trainer, sampler, least=1e-6):
    """Sum of the gaps by the sum of ``1 - pi_trainer``."""
    doubt = [max(-math.expm1(ours), least) for ours in trainer]
    return math.fsum(gaps(trainer, sampler)) / math.fsum(doubt)


def quantile(values, share):
    """The least value that at least ``share`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(1, math.ceil(share * len(ordered))) - 1]


def share_beyond(values, bound):
    return sum(value > bound for value in values) / len(values)
