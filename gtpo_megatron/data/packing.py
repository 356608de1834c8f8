"""Cuts a rank's rows into micro-batches of packed sequences: no padding tokens inside the transformer.

Packed layout: sequences follow one another in one dim of ``P`` tokens, ``cu_seqlens`` marks where each starts. A token
of a response is predicted at the position before it, so a response of length L after a prompt of length Q is scored at
positions ``Q - 1 ... Q + L - 2`` of its sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gtpo_megatron.batch import RolloutBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedMicroBatch:
    """Some rows of a rank, packed.

    Attributes:
        rows: indices into the rank's batch, ``n`` of them.
        input_ids: ``[P]`` int64, padded at the end to a multiple of what the layout asks for.
        position_ids: ``[P]`` int64, restarting at 0 for every sequence.
        cu_seqlens: ``[n + 1]`` int32; the last entry is ``P``: the padding counts to the last sequence, where causal
            attention keeps it from being seen.
        max_sequence_tokens: longest sequence, padding included.
        score_positions: ``[R]`` int64, positions whose hidden state predicts a response token, row after row.
        target_ids: ``[R]`` int64, the tokens predicted there.
        token_rows: ``[R]`` int64, which of ``rows`` every scored token belongs to, as an index into ``rows``.
        token_columns: ``[R]`` int64, its position in the response.
    """

    rows: tuple[int, ...]
    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_sequence_tokens: int
    score_positions: Tensor
    target_ids: Tensor
    token_rows: Tensor
    token_columns: Tensor


def plan_micro_batches(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Groups rows so that each group has at most ``budget_tokens`` tokens, first-fit by decreasing length.

    A row longer than the budget gets a micro-batch of its own. Deterministic; at least one micro-batch, which is empty
    when there are no rows, so that every rank runs a backward pass.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    bins: list[list[int]] = []
    used: list[int] = []
    for row in order:
        for i, filled in enumerate(used):
            if filled + lengths[row] <= budget_tokens:
                bins[i].append(row)
                used[i] += lengths[row]
                break
        else:
            bins.append([row])
            used.append(lengths[row])
    return [sorted(rows) for rows in bins] or [[]]


def micro_batches(
    batch: RolloutBatch, rows: Sequence[int], *, budget_tokens: int, multiple: int = 1
) -> list[PackedMicroBatch]:
    """The given rows of a batch, cut and packed; at least one micro-batch."""
    lengths = (batch.prompt_lengths + batch.response_lengths).tolist()
    bins = plan_micro_batches([lengths[row] for row in rows], budget_tokens)
    return [pack(batch, [rows[i] for i in chosen], multiple=multiple) for chosen in bins]


def pack(batch: RolloutBatch, rows: Sequence[int], *, multiple: int = 1) -> PackedMicroBatch:
    """Packs the given rows.

    Args:
        batch: the rank's rows.
        rows: which of them.
        multiple: the packed length is padded to a multiple of this (tensor-parallel size under sequence parallelism).
            An empty micro-batch is ``multiple`` padding tokens long: a transformer cannot run on none.
    """
    inputs, positions, starts = [], [], [0]
    scored, targets, token_rows, token_columns = [], [], [], []
    for index, row in enumerate(rows):
        prompt_length, length = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
        response = batch.response_ids[row, :length]
        inputs += [batch.prompt_ids[row, :prompt_length], response]
        positions.append(torch.arange(prompt_length + length))
        scored.append(starts[-1] + prompt_length - 1 + torch.arange(length))
        targets.append(response)
        token_rows.append(torch.full((length,), index))
        token_columns.append(torch.arange(length))
        starts.append(starts[-1] + prompt_length + length)
    padding = -starts[-1] % multiple if starts[-1] else multiple
    inputs.append(torch.zeros(padding, dtype=torch.int64))
    positions.append(torch.arange(padding))
    cu_seqlens = torch.tensor(starts if rows else [0, 0], dtype=torch.int32)
    cu_seqlens[-1] += padding
    return PackedMicroBatch(
        rows=tuple(rows),
        input_ids=torch.cat(inputs),
        position_ids=torch.cat(positions),
        cu_seqlens=cu_seqlens,
        max_sequence_tokens=int((cu_seqlens[1:] - cu_seqlens[:-1]).max()),
        score_positions=_concatenate(scored),
        target_ids=_concatenate(targets),
        token_rows=_concatenate(token_rows),
        token_columns=_concatenate(token_columns),
    )


def _concatenate(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
