"""A rollout batch that lies in pieces where engines left it: who needs it takes the pieces from shared memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gtpo_megatron.batch import RolloutBatch, concatenate
from gtpo_megatron.errors import RolloutError
from gtpo_megatron.orchestration.parts import RolloutHandle


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutParts:
    """Rows of several batches, in an order of their own.

    Attributes:
        batches: Ray references to a ``RolloutBatch`` each.
        rows: for every response the batch that it is in, and its row there.
    """

    batches: tuple[Any, ...]
    rows: tuple[tuple[int, int], ...]

    def gather(self) -> RolloutBatch:
        """The batch itself, in the process that calls this."""
        import ray

        batches: list[RolloutBatch] = ray.get(list(self.batches))
        starts = [0]
        for batch in batches:
            starts.append(starts[-1] + batch.num_responses)
        rows = [starts[part] + row for part, row in self.rows]
        whole = concatenate(batches)
        return whole if rows == list(range(starts[-1])) else whole.select(rows)


def joined(
    batches: Sequence[Any], summaries: Sequence[dict[str, Any]], rows: Sequence[tuple[int, int]]
) -> RolloutHandle:
    """The handle of a batch in pieces.

    Args:
        batches: references.
        summaries: ``rollout_summary`` of each.
        rows: as in ``RolloutParts``.

    Raises:
        RolloutError: the pieces come from different weights.
    """
    versions = {summary["policy_version"] for summary in summaries}
    if len(versions) != 1:
        raise RolloutError(f"engines sampled from policy versions {sorted(versions)}: exactly one is needed")

    def column(name: str) -> Tensor:
        parts = [summary[name] for summary in summaries]
        return torch.stack([parts[part][row] for part, row in rows]) if rows else parts[0][:0]

    return RolloutHandle(
        payload=RolloutParts(batches=tuple(batches), rows=tuple(rows)),
        prompt_lengths=column("prompt_lengths"),
        response_lengths=column("response_lengths"),
        group_ids=column("group_ids"),
        truncated=column("truncated"),
        policy_version=versions.pop(),
    )


def chosen_rows(rollouts: Sequence[RolloutHandle], rows: Sequence[Sequence[int]]) -> RolloutHandle:
    """The chosen rows of several batches as one; nothing is moved."""
    batches: list[Any] = []
    found: list[tuple[int, int]] = []
    for handle, chosen in zip(rollouts, rows, strict=True):
        parts: RolloutParts = handle.payload
        found += [(len(batches) + parts.rows[row][0], parts.rows[row][1]) for row in chosen]
        batches += parts.batches

    def column(name: str) -> Tensor:
        return torch.cat(
            [
                getattr(handle, name)[torch.tensor(list(chosen), dtype=torch.int64)]
                for handle, chosen in zip(rollouts, rows, strict=True)
            ]
        )

    versions = {handle.policy_version for handle in rollouts}
    if len(versions) != 1:
        raise RolloutError(f"batches of policy versions {sorted(versions)}: exactly one is needed")
    return RolloutHandle(
        payload=RolloutParts(batches=tuple(batches), rows=tuple(found)),
        prompt_lengths=column("prompt_lengths"),
        response_lengths=column("response_lengths"),
        group_ids=column("group_ids"),
        truncated=column("truncated"),
        policy_version=versions.pop(),
    )
