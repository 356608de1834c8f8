"""A rollout batch in pieces in the object store, of which a rank fetches only those with its rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gtpo_megatron.batch import RolloutBatch, RolloutShard, take_rows
from gtpo_megatron.data.sharding import shard_contiguous
from gtpo_megatron.errors import RolloutError
from gtpo_megatron.orchestration.stages.protocols import Attempt, RolloutHandle, rollout_summary

PIECE_BYTES = 512 << 10
"""Approximate size of a piece. A rank fetches whole pieces, so small ones waste less; Ray would send a piece of less
than 100 KiB through the driver instead of the object store."""

Read = Callable[[Sequence[Any]], list[RolloutBatch]]
"""Fetches pieces by their references."""


def read_from_store(references: Sequence[Any]) -> list[RolloutBatch]:
    """From Ray's object store: on this node without a copy, from another node over the network."""
    import ray

    pieces: list[RolloutBatch] = ray.get(list(references))
    return pieces


def in_pieces(batch: RolloutBatch, *, piece_bytes: int = PIECE_BYTES) -> Iterator[RolloutBatch]:
    """Splits a batch by rows into pieces of about equal size, close to ``piece_bytes``."""
    matrices = (batch.response_ids, batch.loss_mask, batch.rollout_logprobs, batch.token_entropy, batch.token_versions)
    token_bytes = sum(matrix.element_size() for matrix in matrices if matrix is not None)
    row_bytes = batch.prompt_lengths * batch.prompt_ids.element_size() + batch.response_lengths * token_bytes
    if batch.routed_experts is not None:
        row_bytes += batch.routed_lengths * batch.routed_experts.shape[1:].numel() * batch.routed_experts.element_size()
    num_pieces = max(1, int(row_bytes.sum()) // piece_bytes)
    for rows in shard_contiguous(row_bytes.tolist(), num_pieces):
        if rows or num_pieces == 1:
            yield batch.select(rows)


def summary_and_pieces(batch: RolloutBatch) -> Iterator[Any]:
    """The answer of an engine: first the summary for the driver, then the pieces, which stay in the object store."""
    pieces = list(in_pieces(batch))
    yield _summary(batch, pieces)
    for piece in pieces:  # noqa: UP028 - Ray sends to the generator, and a list's iterator takes nothing
        yield piece


def group_summaries_and_pieces(groups: Mapping[Attempt, RolloutBatch]) -> Iterator[Any]:
    """The answer of an engine's slice: first the summaries of complete groups, then the pieces of all, in order."""
    pieces = {attempt: list(in_pieces(batch)) for attempt, batch in groups.items()}
    yield {attempt: _summary(batch, pieces[attempt]) for attempt, batch in groups.items()}
    for found in pieces.values():
        for piece in found:  # noqa: UP028 - as above
            yield piece


def _summary(batch: RolloutBatch, pieces: Sequence[RolloutBatch]) -> dict[str, Any]:
    return rollout_summary(batch) | {"piece_sizes": [piece.num_responses for piece in pieces]}


def received(stream: Any) -> tuple[list[Any], Any]:
    """References of the pieces and their summary, of a completed call.

    The caller owns the pieces, so they outlive the engine.

    Raises:
        RolloutError: the engine could not leave all pieces in the object store.
    """
    import ray

    first, *pieces = stream
    summary = ray.get(first)
    _check_pieces(pieces, len(summary["piece_sizes"]))
    return pieces, summary


def received_groups(stream: Any) -> dict[Attempt, RolloutHandle]:
    """The complete groups of a slice, of a completed call.

    Raises:
        RolloutError: as in ``received``.
    """
    import ray

    first, *pieces = stream
    summaries: dict[Attempt, dict[str, Any]] = ray.get(first)
    _check_pieces(pieces, sum(len(summary["piece_sizes"]) for summary in summaries.values()))
    groups = {}
    for attempt, summary in summaries.items():
        mine, pieces = pieces[: len(summary["piece_sizes"])], pieces[len(summary["piece_sizes"]) :]
        groups[attempt] = joined([(mine, summary)], [(0, row) for row in range(sum(summary["piece_sizes"]))])
    return groups


def _check_pieces(pieces: list[Any], expected: int) -> None:
    import ray

    if len(pieces) != expected:
        ray.get(pieces)  # raises Ray's error, if there is one
        raise RolloutError(f"an engine left {len(pieces)} of {expected} pieces of its responses")


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutParts:
    """Rows of several pieces in any order.

    Attributes:
        pieces: references to one ``RolloutBatch`` each.
        rows: piece and row of every response.
    """

    pieces: tuple[Any, ...]
    rows: tuple[tuple[int, int], ...]

    def select(self, rows: Sequence[int]) -> "RolloutParts":
        """Some of the responses, with their pieces; without rows, one piece is kept for its dtypes."""
        found = [self.rows[row] for row in rows]
        kept = sorted({piece for piece, _ in found}) or [0]
        place = {piece: index for index, piece in enumerate(kept)}
        return RolloutParts(
            pieces=tuple(self.pieces[piece] for piece in kept), rows=tuple((place[piece], row) for piece, row in found)
        )

    def gather(self, read: Read = read_from_store) -> RolloutBatch:
        """Fetches the responses into this process."""
        return take_rows(read(self.pieces), self.rows, may_mix=True)

    def one_by_one(self, read: Read = read_from_store) -> Iterator[tuple[list[int], RolloutBatch]]:
        """Yields per piece the indices of its responses and the responses, with one piece in memory at a time."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.pieces]
        for place, (piece, row) in enumerate(self.rows):
            found[piece].append((place, row))
        for reference, pairs in zip(self.pieces, found, strict=True):
            if pairs:
                yield [place for place, _ in pairs], read([reference])[0].select([row for _, row in pairs])


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardParts:
    """A ``RolloutShard`` whose responses are in pieces."""

    parts: RolloutParts
    rows: tuple[int, ...]
    prompt_groups: tuple[int, ...]
    policy_version: int

    def gather(self, read: Read = read_from_store) -> RolloutShard:
        """Fetches the shard into this process."""
        return RolloutShard(
            rollouts=self.parts.gather(read),
            rows=self.rows,
            prompt_groups=self.prompt_groups,
            policy_version=self.policy_version,
        )


def shards(rollouts: RolloutHandle, num_replicas: int) -> list[ShardParts]:
    """Shards the responses over replicas by tokens; rows are ordered by group, so few groups are split."""
    parts: RolloutParts = rollouts.payload
    lengths = (rollouts.prompt_lengths + rollouts.response_lengths).tolist()
    groups = tuple(dict.fromkeys(rollouts.group_ids.tolist()))
    return [
        ShardParts(parts=parts.select(rows), rows=rows, prompt_groups=groups, policy_version=rollouts.policy_version)
        for rows in shard_contiguous(lengths, num_replicas)
    ]


def joined(answers: Sequence[tuple[Sequence[Any], dict[str, Any]]], rows: Sequence[tuple[int, int]]) -> RolloutHandle:
    """The handle of a batch that several engines sampled.

    Args:
        answers: references of the pieces and their summary, per engine.
        rows: per response the engine, and its row among the engine's responses.

    Raises:
        RolloutError: the responses come from different weights.
    """
    summaries = [summary for _, summary in answers]
    oldest = _oldest([summary["policy_version"] for summary in summaries], 0, "engines sampled from")
    places: list[list[tuple[int, int]]] = []
    pieces: list[Any] = []
    for references, summary in answers:
        sizes = summary["piece_sizes"]
        places.append([(len(pieces) + piece, row) for piece, size in enumerate(sizes) for row in range(size)])
        pieces += references

    def column(name: str) -> Tensor:
        columns = [summary[name] for summary in summaries]
        return torch.stack([columns[engine][row] for engine, row in rows]) if rows else columns[0][:0]

    return _handle(RolloutParts(pieces=tuple(pieces), rows=tuple(places[e][row] for e, row in rows)), column, oldest)


def chosen_rows(
    rollouts: Sequence[RolloutHandle], rows: Sequence[Sequence[int]], *, max_spread: int = 0
) -> RolloutHandle:
    """The chosen rows of several batches as one, without a copy.

    Args:
        rollouts: the batches.
        rows: chosen rows of each batch.
        max_spread: largest difference allowed between policy versions.

    Raises:
        RolloutError: the batches come from different weights.
    """
    oldest = _oldest([handle.policy_version for handle in rollouts], max_spread, "batches of")
    pieces: list[Any] = []
    found: list[tuple[int, int]] = []
    for handle, chosen in [pair for pair in zip(rollouts, rows, strict=True) if pair[1]] or [(rollouts[0], ())]:
        parts: RolloutParts = handle.payload.select(chosen)
        found += [(len(pieces) + piece, row) for piece, row in parts.rows]
        pieces += parts.pieces

    def column(name: str) -> Tensor:
        return torch.cat(
            [
                getattr(handle, name)[torch.tensor(list(chosen), dtype=torch.int64)]
                for handle, chosen in zip(rollouts, rows, strict=True)
            ]
        )

    return _handle(RolloutParts(pieces=tuple(pieces), rows=tuple(found)), column, oldest)


def _handle(parts: RolloutParts, column: Callable[[str], Tensor], policy_version: int) -> RolloutHandle:
    return RolloutHandle(
        payload=parts,
        prompt_lengths=column("prompt_lengths"),
        response_lengths=column("response_lengths"),
        own_lengths=column("own_lengths"),
        group_ids=column("group_ids"),
        truncated=column("truncated"),
        is_multi_version=column("is_multi_version"),
        policy_version=policy_version,
        engines=column("engines"),
    )


def _oldest(versions: Sequence[int], max_spread: int, what: str) -> int:
    oldest = min(versions)
    if max(versions) - oldest > max_spread:
        allowed = f"at most {max_spread} may lie between them" if max_spread else "exactly one is needed"
        raise RolloutError(f"{what} policy versions {sorted(set(versions))}: {allowed}")
    return oldest
