"""Attention with sinks and a window, in scalar loops: gpt-oss's (arXiv 2508.10925; sinks: arXiv 2309.17453)."""

import math


def attention(query, key, value, sinks, window, scale):
    """``o_i = sum_j exp(s_ij) v_j / (exp(sink) + sum_j exp(s_ij))``, over ``i - window < j <= i``.

    Args:
        query: ``[tokens][heads][size]``.
        key: ``[tokens][groups][size]``; neighbouring heads share a group.
        value: as ``key``.
        sinks: ``[heads]``.
        window: tokens that a token sees, itself among them.
        scale: of the scores ``s_ij = scale q_i . k_j``.
    """
    heads_per_group = len(query[0]) // len(key[0])
    outputs = []
    for i, rows in enumerate(query):
        outputs.append([])
        for head, q in enumerate(rows):
            group = head // heads_per_group
            seen = range(max(0, i - window + 1), i + 1)
            weights = [math.exp(scale * sum(a * b for a, b in zip(q, key[j][group], strict=True))) for j in seen]
            total = math.exp(sinks[head]) + sum(weights)
            outputs[-1].append(
                [
                    sum(weight * value[j][group][place] for weight, j in zip(weights, seen, strict=True)) / total
                    for place in range(len(q))
                ]
            )
    return outputs
