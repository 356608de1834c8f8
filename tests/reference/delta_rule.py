"""The gated delta rule, a token at a time (arXiv 2412.06464, Eq. 10), and the convolution before it."""

import torch


def delta_rule(query, key, value, log_decay, strength):
    """``S_t = a_t S_(t-1) + b_t k_t (v_t - (a_t S_(t-1))^T k_t)^T``, ``o_t = S_t^T q_t``, of one sequence.

    Args:
        query: ``[tokens, key heads, key_size]``, of any length; so ``key``.
        key: the same.
        value: ``[tokens, value heads, value_size]``; neighbouring heads share a key head.
        log_decay: ``[tokens, value heads]``.
        strength: the same.
    """
    shared = value.shape[1] // key.shape[1]
    query, key = (one / (one.square().sum(-1, keepdim=True) + 1e-6).sqrt() for one in (query, key))
    outputs = []
    for head in range(value.shape[1]):
        state = value.new_zeros(key.shape[2], value.shape[2])
        rows = []
        for q, k, v, g, b in zip(
            query[:, head // shared],
            key[:, head // shared],
            value[:, head],
            log_decay[:, head],
            strength[:, head],
            strict=True,
        ):
            state = g.exp() * state
            state = state + b * torch.outer(k, v - state.T @ k)
            rows.append(state.T @ q / len(q) ** 0.5)
        outputs.append(torch.stack(rows))
    return torch.stack(outputs, 1)


def convolved(inputs, weight):
    """``y_t = sum_i w_(k-1-i) x_(t-i)`` of one sequence ``[tokens, channels]``, ``x`` being 0 before it."""
    num = weight.shape[1]
    return torch.stack(
        [
            sum(weight[:, num - 1 - i] * inputs[token - i] for i in range(min(num, token + 1)))
            for token in range(len(inputs))
        ]
    )
