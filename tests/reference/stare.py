# ruff: noqa: N803, N806 - the paper's symbols
"""STARE's weights as scalar loops (arXiv 2606.19236, Algorithm 1)."""

from tests.reference import grpo


def advantages(H, r, g, logprobs, *, percent, W, M, target, variant):
    """``omega A``; ``percent`` is ``P`` as a whole number, so that its part of a set is an exact one."""
    A = grpo.advantages(H, r, g)
    entropies = [h for row in H for h in row]
    if not entropies:
        return [[] for _ in H]
    weights = [[1.0] * len(row) for row in H]
    if sum(entropies) / len(entropies) < target:
        for sign, weight in ((1, W), (-1, M if variant == "C2" else 1.0)):
            side = [(i, t) for i, row in enumerate(H) for t in range(len(row)) if A[i] * sign > 0]
            if not side:
                continue
            surprisals = sorted((-logprobs[i][t] for i, t in side), reverse=True)
            k = -(-percent * len(side) // 100)
            for i, t in side:
                if -logprobs[i][t] >= surprisals[k - 1]:
                    weights[i][t] = weight
    return [[weight * A[i] for weight in row] for i, row in enumerate(weights)]
