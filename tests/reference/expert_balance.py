"""Loads of experts and what balances them, in scalar loops over tokens and experts."""

import math

import torch


def loads(choices, num_experts):
    """Tokens per expert; ``choices``: the experts of each token."""
    counted = [0] * num_experts
    for chosen in choices:
        for expert in chosen:
            counted[int(expert)] += 1
    return counted


def load_balancing_loss(scores, counted):
    """``E sum_i f_i P_i``: the Switch Transformer's loss (arXiv 2101.03961, equations 4 to 6) with shares of any load.

    Args:
        scores: of each token, for each expert; a tensor, so that a gradient can be taken.
        counted: tokens per expert, of whatever load is balanced.
    """
    num_tokens, num_experts = scores.shape
    total = 0.0
    for expert in range(num_experts):
        share = counted[expert] / sum(counted)
        mean = sum(scores[token, expert] for token in range(num_tokens)) / num_tokens
        total = total + share * mean
    return num_experts * total


def z_loss(logits):
    """Mean over tokens of the squared log-sum-exp (ST-MoE, arXiv 2202.08906, equation 5)."""
    total = 0.0
    for token in logits:
        top = max(float(value) for value in token)
        total = total + (top + torch.log(sum(torch.exp(value - top) for value in token))) ** 2
    return total / len(logits)


def scores_of(logits, kind):
    """Softmax of the logits, or their sigmoids divided by their sum."""
    rows = []
    for token in logits:
        values = torch.exp(token - token.max()) if kind == "softmax" else 1 / (1 + torch.exp(-token))
        rows.append(values / values.sum())
    return torch.stack(rows)


def moved_bias(bias, counted, rate):
    """The bias after an update: up for less than the mean load, down for more (arXiv 2408.15664, algorithm 1)."""
    mean = sum(counted) / len(counted)
    return [b + rate * ((n < mean) - (n > mean)) for b, n in zip(bias, counted, strict=True)]


def load_statistics(counted_by_layer):
    """Largest over mean of the least even layer, share of dead experts, mean of entropy over its largest."""
    ratios, dead, entropies = [], 0, []
    for counted in counted_by_layer:
        total, num = sum(counted), len(counted)
        ratios.append(max(counted) * num / total if total else 0.0)
        dead += sum(n == 0 for n in counted)
        entropies.append(-sum(n / total * math.log(n / total) for n in counted if n) / math.log(num) if total else 0.0)
    return max(ratios), dead / sum(map(len, counted_by_layer)), sum(entropies) / len(entropies)
