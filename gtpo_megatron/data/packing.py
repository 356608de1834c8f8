"""Splits a rank's rows into micro-batches of packed sequences.

A row is one sequence, or several if its response has branches; each token is scored in the first one that has it.
Sequences are concatenated in one dim of ``P`` tokens; ``cu_seqlens`` has their starts. A token is predicted at the
position before it, so a response of length L after a prompt of length Q is scored at positions ``Q - 1 ... Q + L - 2``.

What a transformer with causal attention makes of a token depends on that token and those before it. So sequences may
share a prefix, as the responses to one prompt and the branches of one episode do: the first of a micro-batch has its
tokens, and the others read their keys and values. They are run once, and their gradient is the sum of what all ask for.

Under context parallelism the ranks of a group share every sequence: it is cut into ``2 c`` chunks of equal length and
rank ``r`` of ``c`` holds chunks ``r`` and ``2 c - 1 - r``, which balances the cost of causal attention.
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
        context_index: index of this rank among them.
        document_multiple: every sequence is padded to a multiple of this.
        multiple: the packed length is padded to a multiple of this.
        min_micro_batches: empty micro-batches are added up to this; an interleaved pipeline needs one per stage.
        min_prefix_tokens: fewest tokens of a prefix that sequences share; 0: every sequence has all of its tokens.
    """

    context_size: int = 1
    context_index: int = 0
    document_multiple: int = 1
    multiple: int = 1
    min_micro_batches: int = 1
    min_prefix_tokens: int = 0

    def __post_init__(self) -> None:
        if self.min_prefix_tokens and (self.context_size, self.document_multiple) != (1, 1):
            raise ValueError(
                f"{self}: prefixes are shared on one context-parallel rank, without padding between sequences"
            )

    @classmethod
    def of(cls, config: ParallelConfig, context_index: int, *, min_prefix_tokens: int = 0) -> "PackLayout":
        """The layout that a parallel configuration requires."""
        return cls(
            min_prefix_tokens=min_prefix_tokens,
            context_size=config.context_parallel_size,
            context_index=context_index,
            document_multiple=config.document_multiple,
            multiple=config.sequence_multiple,
            min_micro_batches=config.pipeline_parallel_size if config.virtual_pipeline_size > 1 else 1,
        )

    def padded(self, length: int) -> int:
        """Length of a sequence with padding."""
        return -(-length // self.document_multiple) * self.document_multiple


Stretches = tuple[tuple[int, int], ...]
"""First and last-plus-one places."""


def num_places(stretches: Stretches) -> int:
    """Of all stretches together."""
    return sum(end - start for start, end in stretches)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedMicroBatch:
    """Some rows of a rank, packed: ``P`` tokens, of which this rank holds ``p = P / context_size``.

    Attributes:
        rows: ``n`` indices into the rank's batch.
        sequences: row, and number of the path in it, of each of its ``m`` sequences.
        input_ids: ``[p]`` int64.
        position_ids: ``[p]`` int64, places in the sequences.
        is_padding: ``[p]`` bool, tokens of no sequence; what they are in a transformer reaches no token of one.
        cu_seqlens: ``[m + 1]`` int32, starts of the sequences behind their prefixes, over all context ranks; the last
            entry is ``P``. Padding belongs to the sequence before it; causal attention hides it.
        prefixes: of every sequence, the packed stretches of its first tokens that earlier ones have, in their order; ()
            of one that has all of its tokens.
        max_sequence_tokens: length of the longest sequence with prefix and padding.
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
    prefixes: tuple[Stretches, ...]
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
    if layout.min_prefix_tokens:
        parts, lengths = _joined_families(parts, budget_tokens, layout.min_prefix_tokens)
    else:
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


@dataclass(frozen=True, slots=True, eq=False)
class _Sequence:
    """A sequence of a row.

    Attributes:
        row: index into the rank's batch.
        number: of the path in the row.
        ids: ``[n]`` int64, its tokens.
        columns: ``[n - num_prompt_tokens]`` int64, places in the response of those behind the prompt.
        num_known: of these, the first ones that an earlier path of the row has scored.
    """

    row: int
    number: int
    ids: Tensor
    columns: Tensor
    num_known: int

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.ids) - len(self.columns)

    @property
    def prompt(self) -> Tensor:
        return self.ids[: self.num_prompt_tokens]


def _sequences(batch: RolloutBatch, rows: Sequence[int]) -> list[_Sequence]:
    prompts, found = batch.prompt_lengths.tolist(), []
    for row in rows:
        for number, path in enumerate(batch.paths(row)):
            columns = _concatenate([torch.arange(first, last) for first, last in path.stretches])
            prompt = batch.prompt_ids[row, : prompts[row] if path.has_prompt else 0]
            ids = torch.cat([prompt, batch.response_ids[row, columns]])
            found.append(_Sequence(row, number, ids, columns, path.num_known))
    return found


class _SharedPrefixes:
    """Says of sequences, one after the other, how many of their first tokens an earlier one has, and which.

    Rows share prompts, or prefixes of them; the sequences of one row also what was said, for which each is compared
    with all earlier ones of its row.
    """

    def __init__(self, min_tokens: int) -> None:
        self._min_tokens = min_tokens
        self._of_row: list[tuple[int, _Sequence]] = []
        self._with_prompt: tuple[int, _Sequence] | None = None
        self._count = 0

    def add(self, one: _Sequence) -> tuple[int, int]:
        """The number of tokens, 0 if there are fewer than ``min_tokens``, and the number of the earlier sequence."""
        if not self._min_tokens:
            return 0, 0
        if self._of_row and self._of_row[0][1].row != one.row:
            self._of_row = []
        found = [(_num_common(one.ids, other.ids), number) for number, other in self._of_row]
        if self._with_prompt is not None:
            number, other = self._with_prompt
            found.append((_num_common(one.prompt, other.prompt), number))
        most = max(found, default=(0, 0))
        self._of_row.append((self._count, one))
        if one.num_prompt_tokens:
            self._with_prompt = (self._count, one)
        self._count += 1
        return most if most[0] >= self._min_tokens else (0, 0)


def _num_common(one: Tensor, other: Tensor) -> int:
    length = min(len(one), len(other))
    differs = (one[:length] != other[:length]).nonzero()
    return int(differs[0]) if len(differs) else length


def _joined_families(
    parts: Sequence[Sequence[_Sequence]], budget_tokens: int, min_prefix_tokens: int
) -> tuple[list[list[_Sequence]], list[int]]:
    """Joins parts with one prompt, as many as the budget allows; also the tokens that each of those has when packed."""
    families: dict[bytes, list[Sequence[_Sequence]]] = {}
    for part in parts:
        families.setdefault(part[0].prompt.numpy().tobytes(), []).append(part)
    joined: list[list[_Sequence]] = []
    lengths: list[int] = []
    for family in families.values():
        prefixes = None
        for part in family:
            length = 0 if prefixes is None else sum(one.num_tokens - prefixes.add(one)[0] for one in part)
            if prefixes is None or lengths[-1] + length > budget_tokens:
                prefixes = _SharedPrefixes(min_prefix_tokens)
                length = sum(one.num_tokens - prefixes.add(one)[0] for one in part)
                joined.append([])
                lengths.append(0)
            joined[-1] += part
            lengths[-1] += length
    return joined, lengths


def _packed(batch: RolloutBatch, sequences: Sequence[_Sequence], layout: PackLayout) -> PackedMicroBatch:
    prefixes = _SharedPrefixes(layout.min_prefix_tokens)
    shared = [prefixes.add(one) for one in sequences]
    bounds = _bounds([one.num_tokens - num for one, (num, _) in zip(sequences, shared, strict=True)], layout)
    rows = tuple(dict.fromkeys(one.row for one in sequences))
    index_of = {row: index for index, row in enumerate(rows)}
    input_ids = torch.zeros(bounds[-1], dtype=torch.int64)
    is_padding = torch.ones(bounds[-1], dtype=torch.bool)
    places: list[Tensor] = []  # of every sequence, where its tokens are
    scored, targets, token_rows, token_columns = [], [], [], []
    for one, (num_shared, earlier), start in zip(sequences, shared, bounds, strict=False):
        end = start + one.num_tokens - num_shared
        input_ids[start:end] = one.ids[num_shared:]
        is_padding[start:end] = False
        own_part = torch.arange(start, end)
        places.append(torch.cat([places[earlier][:num_shared], own_part]) if num_shared else own_part)
        own = batch.loss_mask[one.row, one.columns].nonzero().flatten()
        own = own[own >= one.num_known]
        scored.append(places[-1][one.num_prompt_tokens - 1 + own])
        targets.append(one.ids[one.num_prompt_tokens + own])
        token_rows.append(torch.full((len(own),), index_of[one.row]))
        token_columns.append(one.columns[own])
    starts = [num for num, _ in shared] or [0]
    positions = _concatenate(
        [
            torch.arange(num, num + end - start)
            for num, (start, end) in zip(starts, itertools.pairwise(bounds), strict=True)
        ]
    )
    longest = int(positions.max()) + 1
    score_positions, target_ids = _concatenate(scored), _concatenate(targets)
    which = torch.arange(len(score_positions))
    if layout.context_size > 1:
        held = held_positions(bounds, layout.context_size, layout.context_index)
        place = torch.full((bounds[-1],), -1).index_copy(0, held, torch.arange(len(held)))[score_positions]
        which = (place >= 0).nonzero()[:, 0]
        input_ids, positions, is_padding = input_ids[held], positions[held], is_padding[held]
        score_positions, target_ids = place[which], target_ids[which]
    return PackedMicroBatch(
        rows=rows,
        sequences=tuple((one.row, one.number) for one in sequences),
        input_ids=input_ids,
        position_ids=positions,
        is_padding=is_padding,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        prefixes=tuple(_stretches(places[earlier][:num]) if num else () for num, earlier in shared) or ((),),
        max_sequence_tokens=longest,
        score_positions=score_positions,
        target_ids=target_ids,
        scored=which,
        token_rows=_concatenate(token_rows),
        token_columns=_concatenate(token_columns),
    )


def _stretches(places: Tensor) -> Stretches:
    """Places as stretches of neighbours; there is at least one."""
    breaks = (places.diff() != 1).nonzero().flatten() + 1
    edges = [0, *breaks.tolist(), len(places)]
    return tuple((int(places[first]), int(places[last - 1]) + 1) for first, last in itertools.pairwise(edges))


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
