"""Sampled responses as the driver knows them: objects of a few groups, wherever they are, and some numbers a response.

An object is a :data:`Chunk` of neighbouring groups: the chunk itself in one process, a reference to it in Ray's object
store otherwise. A rank fetches the chunks that have its responses; the driver fetches them only to save what was
sampled ahead.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from gtpo_megatron.batch import EpisodeResult, RolloutBatch, RolloutShard, take_rows
from gtpo_megatron.data.sharding import shard_by_updates
from gtpo_megatron.errors import RolloutError

Key = TypeVar("Key", bound=Hashable)

Chunk = tuple[RolloutBatch, ...]
"""Groups whose responses travel together, a batch each, so that none is padded to another's longest response. Of a
group that several engines sampled, a chunk has the responses of one."""

CHUNK_BYTES = 256 << 10
"""Size up to which neighbouring groups are put into a chunk. It is above 100 KiB, below which Ray keeps an object
in the driver's memory, where all ranks ask for it; and low, since a rank needs only a part of the chunks at both ends
of its rows, of every engine (``python -m benchmarks.rollout_fetch``)."""

FETCHED_TOGETHER = 8
"""Chunks that are fetched at the same time where responses are read in turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutHandle:
    """Sampled responses, in any order.

    Attributes:
        objects: the chunks, or references to them.
        places: index of the object, and row in it (counted over its batches), of each response.
        prompt_lengths: ``[B]`` int64.
        response_lengths: ``[B]`` int64.
        own_lengths: ``[B]`` int64, number of tokens that the policy wrote.
        sequence_tokens: ``[B]`` int64, number of tokens that a pass of the trainer reads.
        group_ids: ``[B]`` int64.
        truncated: ``[B]`` bool.
        is_multi_version: ``[B]`` bool, True if several versions of the weights generated the response.
        engines: ``[B]`` int64, index of the engine that sampled each.
        results: an environment's account of each response; () without one.
        policy_version: oldest version of the weights that generated them.
    """

    objects: tuple[Any, ...]
    places: tuple[tuple[int, int], ...]
    prompt_lengths: Tensor
    response_lengths: Tensor
    own_lengths: Tensor
    sequence_tokens: Tensor
    group_ids: Tensor
    truncated: Tensor
    is_multi_version: Tensor
    engines: Tensor
    policy_version: int
    results: tuple[EpisodeResult, ...] = ()

    @classmethod
    def of(cls, *chunk: RolloutBatch, reference: Any = None) -> "RolloutHandle":
        """The responses of a chunk, as of engine 0; ``reference``: to the chunk (None: the chunk itself)."""
        columns = {name: torch.cat([getattr(batch, name) for batch in chunk]) for name in _COLUMNS if name != "engines"}
        return cls(
            objects=(chunk if reference is None else reference,),
            places=tuple((0, row) for row in range(len(columns["group_ids"]))),
            engines=torch.zeros_like(columns["group_ids"]),
            policy_version=min(batch.policy_version for batch in chunk),
            results=tuple(result for batch in chunk for result in batch.results),
            **columns,
        )

    @classmethod
    def of_groups(cls, batch: RolloutBatch, *, put: Callable[[Chunk], Any]) -> "RolloutHandle":
        """The responses of a batch in their order, in chunks, each where ``put`` leaves it."""
        chunks = in_chunks(batch) or [(batch,)]
        order = torch.tensor([row for rows in _rows_by_group(batch).values() for row in rows], dtype=torch.int64)
        return joined([cls.of(*chunk, reference=put(chunk)) for chunk in chunks]).select(order.argsort().tolist())

    @property
    def prompt_groups(self) -> tuple[int, ...]:
        """Labels of the groups, in order of their first responses."""
        return tuple(dict.fromkeys(self.group_ids.tolist()))

    def select(self, rows: Sequence[int]) -> "RolloutHandle":
        """Some of the responses, with their objects; without rows, one object is kept for its dtypes."""
        index = torch.tensor(list(rows), dtype=torch.int64)
        found = [self.places[row] for row in rows]
        kept = sorted({number for number, _ in found}) or [0]
        renumbered = {number: position for position, number in enumerate(kept)}
        return replace(
            self,
            objects=tuple(self.objects[number] for number in kept),
            places=tuple((renumbered[number], row) for number, row in found),
            results=tuple(self.results[row] for row in rows) if self.results else (),
            **{name: getattr(self, name)[index] for name in _COLUMNS},
        )

    def fetch(self) -> RolloutBatch:
        """The responses, in this process, without an environment's results, which are here.

        So those from a checkpoint, which has none, are like the others.
        """
        batches, places = _found(_read(self.objects), self.places)
        return take_rows([replace(batch, results=()) for batch in batches], places, may_mix=True)

    def in_turn(self) -> Iterator[tuple[list[int], RolloutBatch]]:
        """Yields per group (and engine) the indices of its responses and the responses.

        A few chunks are in memory at a time, which were fetched together.
        """
        indices: list[list[int]] = [[] for _ in self.objects]
        for index, (number, _) in enumerate(self.places):
            indices[number].append(index)
        numbers = [number for number, chosen in enumerate(indices) if chosen]
        for first in range(0, len(numbers), FETCHED_TOGETHER):
            window = numbers[first : first + FETCHED_TOGETHER]
            chunks = _read([self.objects[number] for number in window])
            for number, chunk in zip(window, chunks, strict=True):
                yield from _by_batch(chunk, [(index, self.places[index][1]) for index in indices[number]])


_NO_COLUMNS = ("objects", "places", "policy_version", "results")
_COLUMNS = [field.name for field in fields(RolloutHandle) if field.name not in _NO_COLUMNS]


def shards(
    rollouts: RolloutHandle, num_replicas: int, *, updates: Sequence[Sequence[int]] = ()
) -> list[Callable[[], RolloutShard]]:
    """Shards the responses over replicas by tokens; rows are ordered by group, so few groups are split.

    Args:
        rollouts: the responses.
        num_replicas: number of data-parallel replicas.
        updates: prompt groups of each update that is made from them, whose tokens are shared equally.

    Returns:
        Per replica a function that fetches its shard, in the process that calls it.
    """
    lengths = rollouts.sequence_tokens.tolist()
    rollouts = replace(rollouts, results=())  # of which no replica reads any
    return [
        partial(_fetch_shard, rollouts.select(rows), rows, rollouts.prompt_groups, rollouts.policy_version)
        for rows in shard_by_updates(lengths, rollouts.group_ids.tolist(), updates, num_replicas)
    ]


def _fetch_shard(
    mine: RolloutHandle, rows: tuple[int, ...], prompt_groups: tuple[int, ...], policy_version: int
) -> RolloutShard:
    return RolloutShard(
        rollouts=mine.fetch(), global_rows=rows, prompt_groups=prompt_groups, policy_version=policy_version
    )


def joined(rollouts: Sequence[RolloutHandle], *, max_spread: int = 0) -> RolloutHandle:
    """Several batches as one, in their order, without a copy of a response.

    Args:
        rollouts: at least one batch; those without responses count for nothing beside others.
        max_spread: largest difference allowed between policy versions.

    Raises:
        RolloutError: the batches come from different weights.
    """
    versions = sorted({handle.policy_version for handle in rollouts})
    if versions[-1] - versions[0] > max_spread:
        allowed = f"at most {max_spread} may lie between them" if max_spread else "exactly one is needed"
        raise RolloutError(f"responses of policy versions {versions}: {allowed}")
    parts = [handle for handle in rollouts if handle.places] or [rollouts[0]]
    places: list[tuple[int, int]] = []
    objects: list[Any] = []
    for handle in parts:
        places += [(len(objects) + number, row) for number, row in handle.places]
        objects += handle.objects
    return RolloutHandle(
        objects=tuple(objects),
        places=tuple(places),
        policy_version=versions[0],
        results=tuple(result for handle in parts for result in handle.results)
        if all(handle.results for handle in parts)  # those from a checkpoint have rewards already
        else (),
        **{name: torch.cat([getattr(handle, name) for handle in parts]) for name in _COLUMNS},
    )


def in_chunks(batch: RolloutBatch) -> list[Chunk]:
    """The groups of a batch in the order of their first responses, neighbours together up to ``CHUNK_BYTES``."""
    chunks: list[list[RolloutBatch]] = []
    left = 0
    for group in split_by_group(batch).values():
        size = _num_bytes(group)
        if size > left:
            chunks.append([])
            left = CHUNK_BYTES
        chunks[-1].append(group)
        left -= size
    return [tuple(chunk) for chunk in chunks]


def _num_bytes(batch: RolloutBatch) -> int:
    """Of the tensors; an environment's results are small beside them."""
    tensors = (getattr(batch, field.name) for field in fields(batch))
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def split_by_group(batch: RolloutBatch) -> dict[int, RolloutBatch]:
    """The responses of each group, by label in order of their first responses; rows of a group keep their order."""
    return {group: batch.select(rows) for group, rows in _rows_by_group(batch).items()}


def _rows_by_group(batch: RolloutBatch) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for row, group in enumerate(batch.group_ids.tolist()):
        found.setdefault(group, []).append(row)
    return found


def handles_then_chunks(chunks: Mapping[Key, Chunk]) -> Iterator[Any]:
    """What an engine yields: first the handles by key, which lack the objects; then the objects, in that order."""
    yield {key: replace(RolloutHandle.of(*chunk), objects=()) for key, chunk in chunks.items()}
    for chunk in chunks.values():  # noqa: UP028 - Ray sends to the generator, and an iterator of values takes nothing
        yield chunk


def received(stream: Any) -> dict[Any, RolloutHandle]:
    """The handles by key of a completed call that yielded ``handles_then_chunks``.

    The caller owns the objects, so they outlive the engine.

    Raises:
        RolloutError: the engine could not leave all of them in the object store.
    """
    import ray

    first, *objects = stream
    handles: dict[Any, RolloutHandle] = ray.get(first)
    if len(objects) != len(handles):
        ray.get(objects)  # raises Ray's error, if there is one
        raise RolloutError(f"an engine left {len(objects)} of {len(handles)} chunks of its responses")
    return {key: replace(handle, objects=(one,)) for (key, handle), one in zip(handles.items(), objects, strict=True)}


def _read(objects: Sequence[Any]) -> list[Chunk]:
    """Fetches objects: from Ray on this node without a copy, from another node over the network."""
    if all(isinstance(one, tuple) for one in objects):
        return list(objects)
    import ray

    chunks: list[Chunk] = ray.get(list(objects))
    return chunks


def _found(
    chunks: Sequence[Chunk], places: Sequence[tuple[int, int]]
) -> tuple[list[RolloutBatch], list[tuple[int, int]]]:
    """The batches that have the places, by chunk and row, and the places by batch and row.

    Without places the first batch is returned, for its dtypes.
    """
    where = [[(number, *place) for place in _rows(chunk)] for number, chunk in enumerate(chunks)]
    found = [where[number][row] for number, row in places]
    used = sorted({(number, batch) for number, batch, _ in found}) or [(0, 0)]
    position = {one: index for index, one in enumerate(used)}
    batches = [chunks[number][batch] for number, batch in used]
    return batches, [(position[number, batch], row) for number, batch, row in found]


def _by_batch(chunk: Chunk, chosen: Sequence[tuple[int, int]]) -> Iterator[tuple[list[int], RolloutBatch]]:
    """Yields per batch of a chunk the chosen responses, by index and row in the chunk, that are in it."""
    rows = _rows(chunk)
    found: list[list[tuple[int, int]]] = [[] for _ in chunk]
    for index, place in chosen:
        number, row = rows[place]
        found[number].append((index, row))
    for batch, pairs in zip(chunk, found, strict=True):
        if pairs:
            yield [index for index, _ in pairs], batch.select([row for _, row in pairs])


def _rows(chunk: Chunk) -> list[tuple[int, int]]:
    """Batch and row in it, of every row of a chunk."""
    return [(number, row) for number, batch in enumerate(chunk) for row in range(batch.num_responses)]
