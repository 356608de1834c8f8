"""Cuts a rank's rows into micro-batches of packed sequences: no padding tokens inside the transformer.

Packed layout: sequences follow one another in one dim of ``P`` tokens, ``cu_seqlens`` marks where each starts. A token
of a response is predicted at the position before it, so a response of length L after a prompt of length Q is scored at
positions ``Q - 1 ... Q + L - 2`` of its sequence.

Under context parallelism the ranks of a group share every sequence: it is cut into ``2 c`` chunks of equal length and
rank ``r`` of ``c`` holds chunks ``r`` and ``2 c - 1 - r``. Causal attention costs a chunk in proportion to its place,
so a pair from both ends makes the ranks' work equal.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gtpo_megatron.batch import RolloutBatch
from gtpo_megatron.config.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PackLayout:
    """How packed sequences are padded and shared.

    Attributes:
        context_size: ranks that share every sequence.
        context_index: this rank among them.
        document_multiple: every sequence is padded to a multiple of this.
        multiple: the packed length is padded to a multiple of this.
        min_micro_batches: an interleaved pipeline needs one a stage; empty ones make up for what is missing.
    """

    context_size: int = 1
    context_index: int = 0
    document_multiple: int = 1
    multiple: int = 1
    min_micro_batches: int = 1

    @classmethod
    def of(cls, config: ParallelConfig, context_index: int) -> "PackLayout":
        """What a layout of ranks asks for."""
        return cls(
            context_size=config.context_parallel_size,
            context_index=context_index,
            document_multiple=config.document_multiple,
            multiple=config.sequence_multiple,
            min_micro_batches=config.pipeline_parallel_size if config.virtual_pipeline_size > 1 else 1,
        )

    def padded(self, length: int) -> int:
        """Tokens that a sequence takes up."""
        return -(-length // self.document_multiple) * self.document_multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedMicroBatch:
    """Some rows of a rank, packed: ``P`` tokens, of which this rank holds ``p = P / context_size``.

    Attributes:
        rows: indices into the rank's batch, ``n`` of them.
        input_ids: ``[p]`` int64.
        position_ids: ``[p]`` int64, restarting at 0 for every sequence.
        cu_seqlens: ``[n + 1]`` int32, of the whole packed sequence; the last entry is ``P``. Padding counts to the
            sequence before it, where causal attention keeps it from being seen.
        max_sequence_tokens: longest sequence, padding included.
        score_positions: ``[r]`` int64, positions among those held whose hidden state predicts a response token.
        target_ids: ``[r]`` int64, the tokens predicted there.
        scored: ``[r]`` int64, which of all ``R`` response tokens they are, row after row; without context parallelism
            ``r = R`` and they are all of them.
        token_rows: ``[R]`` int64, which of ``rows`` every response token belongs to, as an index into ``rows``.
        token_columns: ``[R]`` int64, its position in the response.
    """

    rows: tuple[int, ...]
    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_sequence_tokens: int
    score_positions: Tensor
    target_ids: Tensor
    scored: Tensor
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
    batch: RolloutBatch, rows: Sequence[int], *, budget_tokens: int, layout: PackLayout | None = None
) -> list[PackedMicroBatch]:
    """The given rows of a batch, cut and packed: ``min_micro_batches`` or more, the same cuts on every context rank."""
    layout = layout or PackLayout()
    lengths = (batch.prompt_lengths + batch.response_lengths).tolist()
    bins = plan_micro_batches([layout.padded(lengths[row]) for row in rows], budget_tokens)
    bins += [[]] * (layout.min_micro_batches - len(bins))
    return [pack(batch, [rows[i] for i in chosen], layout=layout) for chosen in bins]


def pack(batch: RolloutBatch, rows: Sequence[int], *, layout: PackLayout | None = None) -> PackedMicroBatch:
    """Packs the given rows.

    Args:
        batch: the rank's rows.
        rows: which of them.
        layout: of the padding and of the tokens that this rank holds. An empty micro-batch is ``multiple`` padding
            tokens long: a transformer cannot run on none.
    """
    layout = layout or PackLayout()
    prompts, responses = (getattr(batch, name)[list(rows)].tolist() for name in ("prompt_lengths", "response_lengths"))
    bounds = _bounds([prompt + response for prompt, response in zip(prompts, responses, strict=True)], layout)
    input_ids = torch.zeros(bounds[-1], dtype=torch.int64)
    scored, token_rows, token_columns = [], [], []
    for index, (row, start, prompt, length) in enumerate(zip(rows, bounds, prompts, responses, strict=False)):
        input_ids[start : start + prompt] = batch.prompt_ids[row, :prompt]
        input_ids[start + prompt : start + prompt + length] = batch.response_ids[row, :length]
        own = batch.loss_mask[row, :length].nonzero().flatten()
        scored.append(start + prompt - 1 + own)
        token_rows.append(torch.full((len(own),), index))
        token_columns.append(own)
    positions = _concatenate([torch.arange(end - start) for start, end in itertools.pairwise(bounds)])
    score_positions = _concatenate(scored)
    targets = input_ids[score_positions + 1]
    which = torch.arange(len(score_positions))
    if layout.context_size > 1:
        held = held_positions(bounds, layout.context_size, layout.context_index)
        place = torch.full((bounds[-1],), -1).index_copy(0, held, torch.arange(len(held)))[score_positions]
        which = (place >= 0).nonzero()[:, 0]
        input_ids, positions, score_positions, targets = input_ids[held], positions[held], place[which], targets[which]
    return PackedMicroBatch(
        rows=tuple(rows),
        input_ids=input_ids,
        position_ids=positions,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        max_sequence_tokens=max(end - start for start, end in itertools.pairwise(bounds)),
        score_positions=score_positions,
        target_ids=targets,
        scored=which,
        token_rows=_concatenate(token_rows),
        token_columns=_concatenate(token_columns),
    )


def held_positions(bounds: Sequence[int], context_size: int, context_index: int) -> Tensor:
    """The packed positions that a context-parallel rank holds, in the order it holds them.

    Args:
        bounds: where sequences start, and the packed length; every length a multiple of ``2 * context_size``.
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
    """Where the padded sequences start, and where the last one ends."""
    bounds = [0, *itertools.accumulate(layout.padded(length) for length in lengths)]
    if len(bounds) == 1:
        return [0, layout.multiple]
    bounds[-1] = -(-bounds[-1] // layout.multiple) * layout.multiple
    return bounds


def _concatenate(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
