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
        batches: Ray references to a ``RolloutBatch`` each; whoever chose them has looked at their policy versions.
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
        whole = concatenate(batches, may_mix=True)
        return whole if rows == list(range(starts[-1])) else whole.select(rows)


def joined(
    batches: Sequence[Any], summaries: Sequence[dict[str, Any]], rows: Sequence[tuple[int, int]], *, max_spread: int = 0
) -> RolloutHandle:
    """The handle of a batch in pieces.

    Args:
        batches: references.
        summaries: ``rollout_summary`` of each.
        rows: as in ``RolloutParts``.
        max_spread: versions that the pieces' policies may be apart.

    Raises:
        RolloutError: the pieces come from different weights.
    """
    oldest = _oldest([summary["policy_version"] for summary in summaries], max_spread, "engines sampled from")

    def column(name: str) -> Tensor:
        parts = [summary[name] for summary in summaries]
        return torch.stack([parts[part][row] for part, row in rows]) if rows else parts[0][:0]

    return RolloutHandle(
        payload=RolloutParts(batches=tuple(batches), rows=tuple(rows)),
        prompt_lengths=column("prompt_lengths"),
        response_lengths=column("response_lengths"),
        own_lengths=column("own_lengths"),
        group_ids=column("group_ids"),
        truncated=column("truncated"),
        is_multi_version=column("is_multi_version"),
        policy_version=oldest,
    )


def chosen_rows(
    rollouts: Sequence[RolloutHandle], rows: Sequence[Sequence[int]], *, max_spread: int = 0
) -> RolloutHandle:
    """The chosen rows of several batches as one; nothing is moved.

    Args:
        rollouts: the batches.
        rows: of each.
        max_spread: as in ``joined``.

    Raises:
        RolloutError: the batches come from different weights.
    """
    oldest = _oldest([handle.policy_version for handle in rollouts], max_spread, "batches of")
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

    return RolloutHandle(
        payload=RolloutParts(batches=tuple(batches), rows=tuple(found)),
        prompt_lengths=column("prompt_lengths"),
        response_lengths=column("response_lengths"),
        own_lengths=column("own_lengths"),
        group_ids=column("group_ids"),
        truncated=column("truncated"),
        is_multi_version=column("is_multi_version"),
        policy_version=oldest,
    )


def _oldest(versions: Sequence[int], max_spread: int, what: str) -> int:
    oldest = min(versions)
    if max(versions) - oldest > max_spread:
        allowed = f"at most {max_spread} may lie between them" if max_spread else "exactly one is needed"
        raise RolloutError(f"{what} policy versions {sorted(set(versions))}: {allowed}")
    return oldest
