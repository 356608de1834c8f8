# ruff: noqa: N803, N806 - the paper's symbols
"""FIPO as scalar loops (arXiv 2603.19835, Eq. 3-8). Rows hold the policy's own tokens only."""

import math


def influence(new, old, A, *, tau, low, high, safety, c):
    """``f_t`` of one response."""
    d = [n - o for n, o in zip(new, old, strict=True)]
    result = []
    for t in range(len(d)):
        F = 0.0
        for k in range(t, len(d)):
            if not (A[k] < 0 and math.exp(d[k]) > c):
                F += 2 ** (-(k - t) / tau) * d[k]
        f = min(max(math.exp(F), 1 - low), 1 + high)
        result.append(1.0 if A[t] < 0 and math.exp(d[t]) > safety else f)
    return result


def objective(new, old, A, *, eps_low, eps_high, c, **constants):
    """Eq. 8 with the dual clip: mean over all tokens."""
    terms = []
    for n, o, a in zip(new, old, A, strict=True):
        for t, f in enumerate(influence(n, o, a, c=c, **constants)):
            w, fa = math.exp(n[t] - o[t]), f * a[t]
            term = min(w * fa, min(max(w, 1 - eps_low), 1 + eps_high) * fa)
            terms.append(max(term, c * fa) if fa < 0 else term)
    return sum(terms) / len(terms)
