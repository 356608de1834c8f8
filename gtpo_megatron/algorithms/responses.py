"""One value a response instead of one a token: the same maths on a batch whose responses all have one token."""

from dataclasses import replace

import torch
from torch import Tensor

from gtpo_megatron.algorithms.pools import Standardised
from gtpo_megatron.algorithms.shares import Shares
from gtpo_megatron.algorithms.table import ResponseTable


def one_token_table(table: ResponseTable, values: Tensor) -> ResponseTable:
    """The batch as if every response were its value: all rows are here, each with one token of weight ``values[i]``."""
    return replace(
        table,
        lengths=table.is_live.to(torch.int64),
        lowest=values,
        highest=values,
        owners=torch.zeros_like(table.owners),
        rank=0,
    )


def response_values(values: Tensor) -> Shares:
    """Values ``[R]`` float64 in the place of shares, for ``standardise``."""
    return Shares(
        values=torch.zeros_like(values)[:, None],
        lowest=values,
        highest=values,
        origin=values,
        count=torch.ones_like(values),
        total=torch.zeros_like(values),
        total_square=torch.zeros_like(values),
    )


def spread_over_tokens(result: Standardised, table: ResponseTable, response_mask: Tensor) -> Standardised:
    """Repeats one value a response on its tokens.

    Args:
        result: ``[R, 1]`` on the CPU.
        table: of the batch.
        response_mask: ``[B, T]`` bool.

    Returns:
        ``[B, T]`` float32 on the mask's device, zero outside it.
    """
    live, mine = response_mask.to(torch.float32), table.mine
    shaped = live * result.shaped_rewards[mine].to(live)
    return Standardised(
        shaped_rewards=shaped,
        advantages=live.mul_(result.advantages[mine].to(live)),
        flips=result.flips[mine] * table.lengths[mine],
    )
