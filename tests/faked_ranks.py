"""Ranks in one process, for tests that want thousands of shardings a minute: threads of which one runs at a time.

A rank runs until its next collective and hands the turn to the next rank; the last one combines what all of them
brought. So a run is deterministic, and ranks that are in different collectives are an error instead of a hang.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gtpo_megatron.errors import ConfigError, DataError, GTPOError, ShapeError


class World:
    """What the ranks of one run share.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.turns = [threading.Semaphore(0) for _ in range(size)]
        self.brought: list[tuple[str, Any]] = [("", None)] * size
        self.outcome: Any = None
        self.problem: Exception | None = None

    def collective(self, rank: int, name: str, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """What ``combine`` makes of the values of all ranks."""
        self.brought[rank] = (name, value)
        if rank == self.size - 1:
            try:
                names = [what for what, _ in self.brought]
                assert len(set(names)) == 1, f"ranks are in different collectives: {names}"
                self.outcome = combine([value for _, value in self.brought])
            except Exception as error:  # noqa: BLE001 - all ranks must hear of it
                self.problem = error
        self.turns[(rank + 1) % self.size].release()
        self.turns[rank].acquire()
        if self.problem is not None:
            raise self.problem
        return self.outcome

    def run(self, function: Callable[["FakedReduction"], Any]) -> list[Any]:
        """``function(reduction)`` on every rank; what it returned or the GTPOError that it raised, in rank order."""
        results: list[Any] = [None] * self.size

        def rank_main(rank: int) -> None:
            self.turns[rank].acquire()
            try:
                try:
                    results[rank] = function(FakedReduction(self, rank))
                except GTPOError as error:
                    results[rank] = error
                self.collective(rank, "end", None, lambda _: None)
            except Exception as error:  # noqa: BLE001 - raised below, in the caller's thread
                self.problem = self.problem or error
            finally:
                self.turns[(rank + 1) % self.size].release()

        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        self.turns[0].release()
        for thread in threads:
            thread.join()
        if self.problem is not None:
            raise self.problem
        return results


class FakedReduction:
    """``Reduction`` of one rank of a world."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank

    def agree(self, read: Callable[[], Any], signature: str = "") -> Any:
        problem: GTPOError | None = None
        result: Any = None
        try:
            result = read()
        except GTPOError as error:
            problem = error

        def combine(brought: list[tuple[GTPOError | None, str]]) -> GTPOError | None:
            for rank, (found, _) in enumerate(brought):
                if found is not None:
                    kind = next(kind for kind in (ShapeError, DataError, ConfigError) if isinstance(found, kind))
                    return kind(f"data-parallel rank {rank}: {found}")
            if len({text for _, text in brought}) > 1:
                return ConfigError("data-parallel ranks have different algorithm configurations")
            return None

        outcome = self.world.collective(self.rank, "agree", (problem, signature), combine)
        if outcome is not None:
            raise outcome
        return result

    def gather(self, values: Tensor) -> tuple[Tensor, slice]:
        parts = self.world.collective(self.rank, "gather", values.clone(), list)
        first = sum(len(part) for part in parts[: self.rank])
        return torch.cat(parts), slice(first, first + len(values))

    def max(self, values: Tensor) -> Tensor:
        return self.world.collective(
            self.rank, f"max of {len(values)}", values.clone(), lambda all_: torch.stack(all_).amax(0)
        ).clone()

    def sum(self, values: Tensor) -> Tensor:
        return self.world.collective(
            self.rank, f"sum of {len(values)}", values.clone(), lambda all_: torch.stack(all_).sum(0)
        ).clone()
