"""Metrics of a credit assignment over the whole batch."""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.sums import Reduction, exact_sum
from gtpo_megatron.algorithms.token_batch import CreditBatch
from gtpo_megatron.batch import Credit


def credit_metrics(credit: Credit, batch: CreditBatch) -> dict[str, float]:
    """Metrics of the batch, the same on every rank. A metric over an empty set is omitted.

    - ``credit/correct_tokens_negative_frac``: tokens of correct responses with a negative advantage;
      ``credit/incorrect_tokens_positive_frac``: the reverse.
    - ``credit/one_sided_groups_frac``: groups whose responses are all correct or all incorrect.
    - ``credit/entropy_correct_nats``, ``_incorrect``: mean token entropy.

    Collectives: those of ``_Sides``.
    """
    table = batch.table
    tokens = _Sides(batch.on_tokens(table.is_correct), batch.reduction)
    flipped = torch.where(tokens.is_correct, credit.advantages < 0, credit.advantages > 0)
    incorrect_flips, correct_flips = tokens.count(flipped)
    incorrect_nats, correct_nats = tokens.sum(batch.entropy)
    live_groups = torch.zeros(table.num_groups, dtype=torch.bool)
    live_groups[table.group_index[table.is_live]] = True
    ratios = {
        "correct_tokens_negative_frac": (correct_flips, tokens.sizes[1]),
        "incorrect_tokens_positive_frac": (incorrect_flips, tokens.sizes[0]),
        "entropy_correct_nats": (correct_nats, tokens.sizes[1]),
        "entropy_incorrect_nats": (incorrect_nats, tokens.sizes[0]),
        "one_sided_groups_frac": (int((table.is_one_sided & live_groups).sum()), int(live_groups.sum())),
    }
    return {f"credit/{name}": total / count for name, (total, count) in ratios.items() if count}


def weight_metrics(x_or_y: Tensor, is_correct: Tensor, is_lone: Tensor, reduction: Reduction) -> dict[str, float]:
    """Metrics of the entropy weights of tokens (GTPO) or of responses (GRPO-S), the same on every rank.

    - ``credit/singleton_position_frac``: correct ones without peers (``d_t = 1``): their entropy weight is 1 whatever
      their entropy.
    - ``credit/effective_frac_correct``, ``_incorrect``: ``(sum x)^2 / (N sum x^2)``: 1 if all ``x`` are equal, ``1/N``
      if all but one are 0.

    Args:
        x_or_y: ``[M]`` float64, ``x`` on O+ and ``y`` on O-.
        is_correct: ``[M]`` bool, O+.
        is_lone: ``[M]`` bool: there is nothing to compare it with.
        reduction: the ranks that hold the others. Collectives: those of ``_Sides``.
    """
    sides = _Sides(is_correct, reduction)
    totals, squares = sides.sum(x_or_y), sides.sum(x_or_y.square())
    metrics = {
        f"credit/effective_frac_{name}": total * total / (size * square)
        for name, size, total, square in zip(("incorrect", "correct"), sides.sizes, totals, squares, strict=True)
        if size
    }
    if sides.sizes[1]:
        metrics["credit/singleton_position_frac"] = sides.count(is_lone)[1] / sides.sizes[1]
    return metrics


class _Sides:
    """Sums over the incorrect and over the correct elements of all ranks, in this order.

    Args:
        is_correct: ``[M]`` bool, one per element.
        reduction: the ranks. Collectives, each of two numbers: one ``sum`` for the sizes, one for ``count``, a ``max``
            and a ``sum`` for ``sum``.
    """

    def __init__(self, is_correct: Tensor, reduction: Reduction) -> None:
        self.is_correct, self.reduction = is_correct, reduction
        self.sizes = self.count(torch.ones_like(is_correct))

    def count(self, flags: Tensor) -> list[int]:
        """Number of True values in ``flags``, ``[M]`` bool."""
        correct = (flags & self.is_correct).count_nonzero()
        sides = torch.stack((flags.count_nonzero() - correct, correct))
        numbers: list[int] = self.reduction.sum(sides).tolist()
        return numbers

    def sum(self, values: Tensor) -> list[float]:
        """Sum of the values, ``[M]`` float64."""
        count = torch.tensor(self.sizes, device=values.device)
        numbers: list[float] = exact_sum(values, self.is_correct, count, self.reduction).total.tolist()
        return numbers
