"""Splits a rank's rows into micro-batches of packed sequences.

A row is one sequence, or several if its response has branches; each token is scored in the first one that has it.
Sequences are concatenated in one dim of ``P`` tokens; ``cu_seqlens`` has their starts. A token is predicted at the
position before it, so a response of length L after a prompt of length Q is scored at positions ``Q - 1 ... Q + L - 2``.

Under context parallelism the ranks of a group share every sequence: it is cut into ``2 c`` chunks of equal length and
rank ``r`` of ``c`` holds chunks ``r`` and ``2 c - 1 - r``, which balances the cost of causal attention.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gtpo_megatron.batch import RolloutBatch
from gtpo_megatron.branches import Path
from gtpo_megatron.config.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PackLayout:
    """How packed sequences are padded and shared.

    Attributes:
        context_size: ranks that share every sequence.
        context_index: index of this rank among them.
        document_multiple: every sequence is padded to a multiple of this.
        multiple: the packed length is padded to a multiple of this.
        min_micro_batches: empty micro-batches are added up to this; an interleaved pipeline needs one per stage.
    """

    context_size: int = 1
    context_index: int = 0
    document_multiple: int = 1
    multiple: int = 1
    min_micro_batches: int = 1

    @classmethod
    def of(cls, config: ParallelConfig, context_index: int) -> "PackLayout":
        """The layout that a parallel configuration requires."""
        return cls(
            context_size=config.context_parallel_size,
            context_index=context_index,
            document_multiple=config.document_multiple,
            multiple=config.sequence_multiple,
            min_micro_batches=config.pipeline_parallel_size if config.virtual_pipeline_size > 1 else 1,
        )

    def padded(self, length: int) -> int:
        """Length of a sequence with padding."""
        return -(-length // self.document_multiple) * self.document_multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedMicroBatch:
    """Some rows of a rank, packed: ``P`` tokens, of which this rank holds ``p = P / context_size``.

    Attributes:
        rows: ``n`` indices into the rank's batch.
        sequences: row, and number of the path in it, of each of its ``m`` sequences.
        input_ids: ``[p]`` int64.
        position_ids: ``[p]`` int64, restarting at 0 for every sequence.
        is_padding: ``[p]`` bool, tokens of no sequence; what they are in a transformer reaches no token of one.
        cu_seqlens: ``[m + 1]`` int32, starts of the sequences over all context ranks; the last entry is ``P``. Padding
            belongs to the sequence before it; causal attention hides it.
        max_sequence_tokens: length of the longest sequence with padding.
        score_positions: ``[r]`` int64, indices into ``input_ids`` of the positions that predict a response token.
        target_ids: ``[r]`` int64, the tokens predicted there.
        scored: ``[r]`` int64, their indices among all ``R`` response tokens that are scored here, of all or some
            sequences of ``rows``; without context parallelism ``r = R``.
        token_rows: ``[R]`` int64, the row of every such token, as an index into ``rows``.
        token_columns: ``[R]`` int64, its position in the response.
    """

    rows: tuple[int, ...]
    sequences: tuple[tuple[int, int], ...]
    input_ids: Tensor
    position_ids: Tensor
    is_padding: Tensor
    cu_seqlens: Tensor
    max_sequence_tokens: int
    score_positions: Tensor
    target_ids: Tensor
    scored: Tensor
    token_rows: Tensor
    token_columns: Tensor


def plan_micro_batches(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Groups rows so that each group has at most ``budget_tokens`` tokens, first-fit by decreasing length.

    A row longer than the budget gets its own micro-batch. Without rows there is one empty micro-batch, so that every
    rank runs a backward pass.
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
    batch: RolloutBatch,
    rows: Sequence[int],
    *,
    budget_tokens: int,
    layout: PackLayout | None = None,
    are_together: bool = False,
) -> list[PackedMicroBatch]:
    """Packs rows into micro-batches, at least ``layout.min_micro_batches``; the same rows on every context rank.

    Args:
        batch: the rank's batch.
        rows: indices into it.
        budget_tokens: most tokens of a micro-batch; a longer sequence gets its own.
        layout: see :func:`pack`.
        are_together: no two micro-batches share a row, whatever the budget.
    """
    layout = layout or PackLayout()
    sequences = _sequences(batch, rows)
    parts = [[one] for one in sequences]
    if are_together:
        parts = [list(of_row) for _, of_row in itertools.groupby(sequences, key=lambda one: one.row)]
    lengths = [sum(layout.padded(one.num_tokens) for one in part) for part in parts]
    bins = plan_micro_batches(lengths, budget_tokens)
    bins += [[]] * (layout.min_micro_batches - len(bins))
    return [_packed(batch, [one for i in chosen for one in parts[i]], layout) for chosen in bins]


def pack(batch: RolloutBatch, rows: Sequence[int], *, layout: PackLayout | None = None) -> PackedMicroBatch:
    """Packs the given rows.

    Args:
        batch: the rank's batch.
        rows: indices into it.
        layout: padding, and the tokens that this rank holds. An empty micro-batch has ``multiple`` padding tokens,
            because a transformer cannot run on none.
    """
    return _packed(batch, _sequences(batch, rows), layout or PackLayout())


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A sequence of a row."""

    row: int
    number: int
    path: Path
    num_prompt_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.path.num_tokens


def _sequences(batch: RolloutBatch, rows: Sequence[int]) -> list[_Sequence]:
    prompts = batch.prompt_lengths.tolist()
    return [
        _Sequence(row, number, path, prompts[row] if path.has_prompt else 0)
        for row in rows
        for number, path in enumerate(batch.paths(row))
    ]


def _packed(batch: RolloutBatch, sequences: Sequence[_Sequence], layout: PackLayout) -> PackedMicroBatch:
    bounds = _bounds([one.num_tokens for one in sequences], layout)
    rows = tuple(dict.fromkeys(one.row for one in sequences))
    index_of = {row: index for index, row in enumerate(rows)}
    input_ids = torch.zeros(bounds[-1], dtype=torch.int64)
    is_padding = torch.ones(bounds[-1], dtype=torch.bool)
    scored, token_rows, token_columns = [], [], []
    for one, start in zip(sequences, bounds, strict=False):
        row, prompt = one.row, one.num_prompt_tokens
        columns = _concatenate([torch.arange(first, last) for first, last in one.path.stretches])
        input_ids[start : start + prompt] = batch.prompt_ids[row, :prompt]
        input_ids[start + prompt : start + one.num_tokens] = batch.response_ids[row, columns]
        is_padding[start : start + one.num_tokens] = False
        own = batch.loss_mask[row, columns].nonzero().flatten()
        own = own[own >= one.path.num_known]
        scored.append(start + prompt - 1 + own)
        token_rows.append(torch.full((len(own),), index_of[row]))
        token_columns.append(columns[own])
    positions = _concatenate([torch.arange(end - start) for start, end in itertools.pairwise(bounds)])
    score_positions = _concatenate(scored)
    targets = input_ids[score_positions + 1]
    which = torch.arange(len(score_positions))
    if layout.context_size > 1:
        held = held_positions(bounds, layout.context_size, layout.context_index)
        place = torch.full((bounds[-1],), -1).index_copy(0, held, torch.arange(len(held)))[score_positions]
        which = (place >= 0).nonzero()[:, 0]
        input_ids, positions, is_padding = input_ids[held], positions[held], is_padding[held]
        score_positions, targets = place[which], targets[which]
    return PackedMicroBatch(
        rows=rows,
        sequences=tuple((one.row, one.number) for one in sequences),
        input_ids=input_ids,
        position_ids=positions,
        is_padding=is_padding,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        max_sequence_tokens=max(end - start for start, end in itertools.pairwise(bounds)),
        score_positions=score_positions,
        target_ids=targets,
        scored=which,
        token_rows=_concatenate(token_rows),
        token_columns=_concatenate(token_columns),
    )


def held_positions(bounds: Sequence[int], context_size: int, context_index: int) -> Tensor:
    """The packed positions that a context-parallel rank holds, in its order.

    Args:
        bounds: starts of the sequences, and the packed length; every length is a multiple of ``2 * context_size``.
        context_size: ranks that share every sequence.
        context_index: the rank.

    Returns:
        ``[P / context_size]`` int64: of every sequence chunk ``r``, then chunk ``2 c - 1 - r``.
    """
    held = []
    for start, end in itertools.pairwise(bounds):
        chunk = (end - start) // (2 * context_size)
        held += [
            torch.arange(start + index * chunk, start + (index + 1) * chunk)
            for index in (context_index, 2 * context_size - 1 - context_index)
        ]
    return _concatenate(held)


def _bounds(lengths: Sequence[int], layout: PackLayout) -> list[int]:
    """The starts of the padded sequences, and the packed length."""
    bounds = [0, *itertools.accumulate(layout.padded(length) for length in lengths)]
    if len(bounds) == 1:
        return [0, layout.multiple]
    bounds[-1] = -(-bounds[-1] // layout.multiple) * layout.multiple
    return bounds


def _concatenate(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
