"""What a credit assignment did, in a few numbers of the whole batch."""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.fixed_point import grid_scale
from gtpo_megatron.algorithms.reduction import LocalReduction, Reduction
from gtpo_megatron.algorithms.shares import Shares
from gtpo_megatron.algorithms.table import ResponseTable


def credit_metrics(
    flips: Tensor,
    table: ResponseTable,
    entropy_total: Tensor,
    shares: Shares | None,
    reduction: Reduction,
    *,
    shares_are_global: bool,
    lone_scope: Tensor | None,
) -> dict[str, float]:
    """Metrics of the batch, the same on every rank; one whose set is empty is left out.

    - ``credit/correct_tokens_negative_frac``: tokens of correct responses with a negative advantage;
      ``credit/wrong_tokens_positive_frac``: the reverse.
    - ``credit/one_sided_groups_frac``: groups all correct or all wrong.
    - ``credit/lone_survivor_tokens_frac``: correct tokens at positions where ``d_t = 1``: their share is 1 whatever
      their entropy. Left out where lengths do not say which tokens are alone in their comparison: axes ``response``
      and ``matrix``, and with a shaping mask. Where tokens have no shares, of the group's positions all the same.
    - ``credit/effective_frac_correct``, ``_wrong``: ``(sum x)^2 / (N sum x^2)``: 1 where all weigh the same, ``1/N``
      where one token has it all.
    - ``credit/conservation_residual_correct``, ``_wrong``: ``|mean share - 1|``.
    - ``credit/entropy_correct_nats``, ``_wrong``: mean token entropy.

    Args:
        flips: ``[B]`` float64, tokens of each local response whose advantage has the sign that its outcome has not.
        table: of the batch.
        entropy_total: ``[B]`` float64, sum of the entropies of each local response.
        shares: of this rank's tokens, or of all responses; None where the algorithm has none.
        reduction: one ``max`` and one ``sum`` over ranks.
        shares_are_global: ``shares`` holds all responses of the batch, on every rank.
        lone_scope: ``[R]`` int64, see ``comparison_scope``; among whose correct responses lone survivors are looked
            for. None: not at all.
    """
    mine = table.mine
    is_correct, is_live = table.is_correct[mine], table.is_live[mine]
    local = [flips[is_correct], flips[is_live & ~is_correct], entropy_total[is_correct]]
    local.append(entropy_total[is_live & ~is_correct])
    if shares is not None and not shares_are_global:
        local += _share_rows(shares, is_correct, is_live)
    totals = _exact_totals(local, len(table.lengths), reduction)
    if shares is not None and shares_are_global:
        of_all = _share_rows(shares, table.is_correct, table.is_live)
        totals += _exact_totals(of_all, len(table.lengths), LocalReduction())
    correct_tokens = int(table.lengths[table.is_correct].sum())
    wrong_tokens = int(table.lengths.sum()) - correct_tokens
    live_groups = torch.zeros(table.num_groups, dtype=torch.bool)
    live_groups[table.group_index[table.is_live]] = True
    ratios = {
        "correct_tokens_negative_frac": (totals[0], correct_tokens),
        "wrong_tokens_positive_frac": (totals[1], wrong_tokens),
        "entropy_correct_nats": (totals[2], correct_tokens),
        "entropy_wrong_nats": (totals[3], wrong_tokens),
        "one_sided_groups_frac": (int((table.is_one_sided & live_groups).sum()), int(live_groups.sum())),
    }
    if lone_scope is not None:
        ratios["lone_survivor_tokens_frac"] = (_lone_survivors(table, lone_scope), correct_tokens)
    metrics = {f"credit/{name}": total / count for name, (total, count) in ratios.items() if count}
    if shares is not None:
        for i, name in enumerate(("correct", "wrong")):
            number, total, square = totals[4 + 3 * i : 7 + 3 * i]
            if number:
                metrics[f"credit/effective_frac_{name}"] = total * total / (number * square)
                metrics[f"credit/conservation_residual_{name}"] = abs(total / number - 1)
    return metrics


def _exact_totals(rows: list[Tensor], num_rows: int, reduction: Reduction) -> list[float]:
    """Totals over all ranks' rows, the same bit for bit for any dealing.

    Args:
        rows: ``[*]`` float64 each, on the CPU.
        num_rows: of the whole batch.
        reduction: one ``max`` and one ``sum``, a number for each of ``rows``.
    """
    peaks = torch.stack(
        [values.abs().amax() if len(values) else torch.zeros((), dtype=torch.float64) for values in rows]
    )
    scale = grid_scale(reduction.max(peaks) * num_rows)
    sums = [torch.round(values * factor).to(torch.int64).sum() for values, factor in zip(rows, scale, strict=True)]
    totals: list[float] = (reduction.sum(torch.stack(sums)).to(torch.float64) / scale).tolist()
    return totals


def _share_rows(shares: Shares, is_correct: Tensor, is_live: Tensor) -> list[Tensor]:
    """Number, sum and sum of squares of the shares of each correct, then of each wrong response."""
    result = []
    for rows in (is_correct, is_live & ~is_correct):
        count, origin, total = shares.count[rows], shares.origin[rows], shares.total[rows]
        square = count * origin * origin + 2 * origin * total + shares.total_square[rows]
        result += [count, count * origin + total, square]
    return result


def _lone_survivors(table: ResponseTable, scope: Tensor) -> int:
    """Positions of correct responses at which no other correct response of the scope is alive."""
    rows = torch.nonzero(table.is_correct).flatten()
    rows = rows[torch.argsort(table.lengths[rows], stable=True)]
    rows = rows[torch.argsort(scope[rows], stable=True)]
    lengths, scopes = table.lengths[rows], scope[rows]
    is_longest = torch.ones_like(scopes, dtype=torch.bool)
    is_longest[:-1] = scopes[1:] != scopes[:-1]
    has_second = torch.zeros_like(is_longest)
    has_second[1:] = scopes[1:] == scopes[:-1]
    second = torch.where(has_second, lengths.roll(1), 0)
    return int((lengths - second)[is_longest].sum())
