# ruff: noqa: N803 - symbols of formulas
"""On-policy distillation as scalar loops: Tinker's advantage, TRL's, and the same weighed by the student's entropy."""

import math

from tests.reference import credit


def tinker(student, teacher, *, kl_penalty_coef=1.0):
    """``-coef (log pi - log pi_T)`` of every sampled token: Thinking Machines' "On-Policy Distillation"."""
    return [
        [-kl_penalty_coef * (s - t) for s, t in zip(*rows, strict=True)] for rows in zip(student, teacher, strict=True)
    ]


def minillm(student, teacher, *, gamma):
    """TRL's MiniLLM without length normalisation: the discounted sum of ``log pi_T - log pi`` from a token on."""
    return [
        [math.fsum(gamma ** (k - t) * (teacher_row[k] - row[k]) for k in range(t, len(row))) for t in range(len(row))]
        for row, teacher_row in zip(student, teacher, strict=True)
    ]


def weights(H, g, e, axis, **rules):
    """``1 - e + e H / mean(H)`` over the tokens compared, all responses of a group being on one side."""
    rules = credit.Rules(axis=axis, **rules)
    x = credit.shares(credit.raised(H, rules), [1.0] * len(H), g, rules)
    return [[1 - e + e * value for value in row] for row in x]


def advantages(student, teacher, w, A, *, teacher_coef, reward_coef):
    """``teacher_coef w (log pi_T - log pi) + reward_coef A``, ``A`` being GRPO's of the response."""
    return [
        [teacher_coef * w[i][t] * (teacher[i][t] - s) + reward_coef * A[i] for t, s in enumerate(row)]
        for i, row in enumerate(student)
    ]
