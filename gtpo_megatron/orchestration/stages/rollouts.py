"""Sampled responses as the driver knows them: one object a group, wherever it is, and a few numbers a response.

The object is a ``RolloutBatch`` of a group's responses (of one engine, if several engines sampled the group): the batch
itself in one process, a reference to it in Ray's object store otherwise. A rank fetches the groups that have its
responses; the driver fetches one only to save what was sampled ahead.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from gtpo_megatron.batch import RolloutBatch, RolloutShard, take_rows
from gtpo_megatron.data.sharding import shard_contiguous
from gtpo_megatron.errors import RolloutError

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutHandle:
    """Sampled responses, in any order.

    Attributes:
        objects: where they are.
        places: index of the object, and row in it, of each response.
        prompt_lengths: ``[B]`` int64.
        response_lengths: ``[B]`` int64.
        own_lengths: ``[B]`` int64, number of tokens that the policy wrote.
        group_ids: ``[B]`` int64.
        truncated: ``[B]`` bool.
        is_multi_version: ``[B]`` bool, True if several versions of the weights generated the response.
        engines: ``[B]`` int64, index of the engine that sampled each.
        policy_version: oldest version of the weights that generated them.
    """

    objects: tuple[Any, ...]
    places: tuple[tuple[int, int], ...]
    prompt_lengths: Tensor
    response_lengths: Tensor
    own_lengths: Tensor
    group_ids: Tensor
    truncated: Tensor
    is_multi_version: Tensor
    engines: Tensor
    policy_version: int

    @classmethod
    def of(cls, batch: RolloutBatch, *, reference: Any = None) -> "RolloutHandle":
        """The responses of a batch, as of engine 0; ``reference``: to the batch (None: the batch itself)."""
        return cls(
            objects=(batch if reference is None else reference,),
            places=tuple((0, row) for row in range(batch.num_responses)),
            prompt_lengths=batch.prompt_lengths,
            response_lengths=batch.response_lengths,
            own_lengths=batch.own_lengths,
            group_ids=batch.group_ids,
            truncated=batch.truncated,
            is_multi_version=batch.is_multi_version,
            engines=torch.zeros_like(batch.group_ids),
            policy_version=batch.policy_version,
        )

    @classmethod
    def of_groups(cls, batch: RolloutBatch, *, put: Callable[[RolloutBatch], Any]) -> "RolloutHandle":
        """The responses of a batch in their order, one object a group, each where ``put`` leaves it."""
        groups = [(rows, batch.select(rows)) for rows in _rows_by_group(batch).values()] or [([], batch)]
        order = torch.tensor([row for rows, _ in groups for row in rows], dtype=torch.int64)
        return joined([cls.of(group, reference=put(group)) for _, group in groups]).select(order.argsort().tolist())

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
            **{name: getattr(self, name)[index] for name in _COLUMNS},
        )

    def fetch(self) -> RolloutBatch:
        """The responses, in this process."""
        return take_rows(_read(self.objects), self.places, may_mix=True)

    def by_object(self) -> Iterator[tuple[list[int], RolloutBatch]]:
        """Yields per object the indices of its responses and the responses, with one object in memory at a time."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.objects]
        for index, (number, row) in enumerate(self.places):
            found[number].append((index, row))
        for one, pairs in zip(self.objects, found, strict=True):
            if pairs:
                yield [index for index, _ in pairs], _read([one])[0].select([row for _, row in pairs])


_COLUMNS = [field.name for field in fields(RolloutHandle) if field.name not in ("objects", "places", "policy_version")]


def shards(rollouts: RolloutHandle, num_replicas: int) -> list[Callable[[], RolloutShard]]:
    """Shards the responses over replicas by tokens; rows are ordered by group, so few groups are split.

    Returns:
        Per replica a function that fetches its shard, in the process that calls it.
    """
    lengths = (rollouts.prompt_lengths + rollouts.response_lengths).tolist()
    groups = tuple(dict.fromkeys(rollouts.group_ids.tolist()))
    return [
        partial(_fetch_shard, rollouts.select(rows), rows, groups, rollouts.policy_version)
        for rows in shard_contiguous(lengths, num_replicas)
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
        **{name: torch.cat([getattr(handle, name) for handle in parts]) for name in _COLUMNS},
    )


def split_by_group(batch: RolloutBatch) -> dict[int, RolloutBatch]:
    """The responses of each group, by label in order of their first responses; rows of a group keep their order."""
    return {group: batch.select(rows) for group, rows in _rows_by_group(batch).items()}


def _rows_by_group(batch: RolloutBatch) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for row, group in enumerate(batch.group_ids.tolist()):
        found.setdefault(group, []).append(row)
    return found


def handles_then_groups(groups: Mapping[Key, RolloutBatch]) -> Iterator[Any]:
    """What an engine yields: first the handles by key, which lack the objects; then the objects, in that order."""
    yield {key: replace(RolloutHandle.of(batch), objects=()) for key, batch in groups.items()}
    for batch in groups.values():  # noqa: UP028 - Ray sends to the generator, and an iterator of values takes nothing
        yield batch


def received(stream: Any) -> dict[Any, RolloutHandle]:
    """The handles by key of a completed call that yielded ``handles_then_groups``.

    The caller owns the objects, so they outlive the engine.

    Raises:
        RolloutError: the engine could not leave all of them in the object store.
    """
    import ray

    first, *objects = stream
    handles: dict[Any, RolloutHandle] = ray.get(first)
    if len(objects) != len(handles):
        ray.get(objects)  # raises Ray's error, if there is one
        raise RolloutError(f"an engine left {len(objects)} of {len(handles)} groups of its responses")
    return {key: replace(handle, objects=(one,)) for (key, handle), one in zip(handles.items(), objects, strict=True)}


def _read(objects: Sequence[Any]) -> list[RolloutBatch]:
    """Fetches objects: from Ray on this node without a copy, from another node over the network."""
    if all(isinstance(one, RolloutBatch) for one in objects):
        return list(objects)
    import ray

    batches: list[RolloutBatch] = ray.get(list(objects))
    return batches
