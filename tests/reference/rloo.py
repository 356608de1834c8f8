# ruff: noqa: N803 - the paper's symbols
"""RLOO as scalar loops (arXiv 2402.14740). A row of ``H`` has one value per token; rows without tokens take no part."""


def advantages(H, r, g):
    """``r_i`` minus the mean reward of the other responses of its group, on every token."""
    result = []
    for i, row in enumerate(H):
        others = [r[j] for j in range(len(r)) if j != i and g[j] == g[i] and H[j]]
        result.append([r[i] - sum(others) / len(others) if others else 0.0] * len(row))
    return result


def objective(logprobs, A):
    """``1/N sum_i A_i sum_t log pi(y_it)``, over the responses with tokens."""
    live = [i for i, row in enumerate(logprobs) if row]
    return sum(A[i][t] * logprobs[i][t] for i in live for t in range(len(logprobs[i]))) / len(live)
