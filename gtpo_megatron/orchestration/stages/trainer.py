"""(4) to (9), the trainer: what each stage asks of all Megatron ranks, and how their results become one.

A stage is a call of ``MegatronActor`` on every rank at once, since it may contain collectives. Where the ranks are is
no concern here: :class:`Ranks` reaches them over Ray (``on_ray/ranks.py``) or in this process (``in_process.py``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from gtpo_megatron.batch import RewardBatch, RolloutShard, TokenRecord
from gtpo_megatron.distributed.groups import RankCoordinates
from gtpo_megatron.mismatch.gap_report import GapReport, merged
from gtpo_megatron.observability.metrics import Metric, is_deterministic, merge
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle, shards

if TYPE_CHECKING:
    from gtpo_megatron.actor.actor import MegatronActor
    from gtpo_megatron.weights.push.link import WeightLink

Metrics = dict[str, Metric]
Result = TypeVar("Result")


class Ranks(Protocol):
    """Calls the Megatron ranks."""

    @property
    def coordinates(self) -> Sequence[RankCoordinates]:
        """The coordinates of each rank in the parallel layout, by global rank."""
        ...

    @property
    def hosts(self) -> Sequence[str]:
        """The host of each rank."""
        ...

    def run_on_each(self, stage: str, functions: "Sequence[Callable[[MegatronActor], Result]]") -> list[Result]:
        """Calls a function on each rank, all of them at once; returns their results.

        Args:
            stage: name of the stage, for messages.
            functions: function of each rank; fewer than there are ranks: of the first ones only.

        Raises:
            WorkerError: a rank died, raised, or has not answered in time; the message names it and the stage.
            GTPOError: the error that a rank raised.
        """
        ...


class Trainer:
    """All Megatron ranks.

    The ranks hold one batch from scoring until it is released. Every stage works on it and returns merged metrics. A
    stage that is called out of order raises StageOrderError.

    Args:
        ranks: way to call the ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._data_parallel_size = 1 + max(rank.data_index for rank in ranks.coordinates)

    # ----------------------------------------------------------------------------------------------- stages of a step
    def score_tokens(self, rollouts: RolloutHandle, *, updates: Sequence[Sequence[int]] = ()) -> Metrics:
        """Old log-probs and entropies: each replica scores its responses; a rank fetches the chunks that have any.

        Args:
            rollouts: the responses.
            updates: prompt groups of each update that will be made from them: replicas get equally many tokens of each.
        """

        def score(fetch: Callable[[], RolloutShard]) -> "Callable[[MegatronActor], Metrics]":
            return lambda actor: actor.score_tokens(fetch())

        return self._merged(
            self._ranks.run_on_each("score", [score(fetch) for fetch in self._shards(rollouts, updates)])
        )

    def use_sampler_scores(self, rollouts: RolloutHandle, *, updates: Sequence[Sequence[int]] = ()) -> Metrics:
        """Takes the sampler's log-probs and entropies as the old policy's, without a forward pass."""

        def take(fetch: Callable[[], RolloutShard]) -> "Callable[[MegatronActor], Metrics]":
            return lambda actor: actor.use_sampler_scores(fetch())

        return self._merged(
            self._ranks.run_on_each("score", [take(fetch) for fetch in self._shards(rollouts, updates)])
        )

    def credit_tokens(self, rewards: RewardBatch) -> Metrics:
        """Shaped rewards and advantages of the scored batch; they do not depend on the sharding."""
        # each rank gets a copy, and credit reads no parts and no texts, which can be megabytes
        needed = replace(rewards, parts={}, info=())
        return self._merged(self._all("credit", lambda actor: actor.credit_tokens(needed)))

    def update(self, *, step: int) -> Metrics:
        """The optimizer updates of a step."""
        return self._merged(self._all("update", lambda actor: actor.update(step)))

    # -------------------------------------------------------------------------------------- -- looking at the batch
    def sample_records(self, group_ids: Sequence[int]) -> list[TokenRecord]:
        """The responses of the chosen groups with entropies and credit, in the order of the batch."""
        chosen = list(group_ids)
        rows = self._all("sampled texts", lambda actor: actor.sample_records(chosen))
        found = [row for part in self._reporting(rows) for row in part]
        return [record for _, record in sorted(found, key=lambda row: row[0])]

    def explain_gap(self, typical_nats: float) -> GapReport:
        """Where the log-prob gaps of the responses are; after scoring, or after an update without it."""
        return merged(self._reporting(self._all("score", lambda actor: actor.explain_gap(typical_nats))))

    def expert_load(self) -> dict[int, list[int]]:
        """Tokens that each expert got at the last step, by layer, of all ranks; empty for a dense model."""
        return self._all("expert load", lambda actor: actor.expert_load())[0]

    def release_batch(self) -> None:
        """Frees the batch; the next scoring does so too."""
        self._all("release", lambda actor: actor.release_batch())

    # --------------------------------------------------------------------------------------------------------- memory
    def offload(self) -> None:
        """Moves gradients and optimizer state to the host."""
        self._all("memory", lambda actor: actor.offload())

    def onload(self) -> None:
        """Moves gradients and optimizer state back to the GPU."""
        self._all("memory", lambda actor: actor.onload())

    # ---------------------------------------------------------------------------------------------------- checkpoints
    def begin_save(self, folder: Path, *, in_background: bool) -> None:
        """Every rank takes a snapshot and starts to write its part of a checkpoint."""
        self._all("checkpoint", lambda actor: actor.begin_save(str(folder), in_background))

    def is_save_written(self) -> bool:
        """Whether every rank has written its part, or failed to."""
        return all(self._all("checkpoint", lambda actor: actor.is_save_written()))

    def finish_save(self) -> dict[str, str]:
        """Waits until every rank has written its part; returns the checksum of every file, by name."""
        parts = self._all("checkpoint", lambda actor: actor.finish_save())
        return {name: checksum for part in parts for name, checksum in part.items()}

    def load(self, folder: Path, *, checksums: Mapping[str, str]) -> None:
        """Every rank compares the files with the checksums and restores its part of a checkpoint."""
        expected = dict(checksums)
        self._all("checkpoint", lambda actor: actor.load(str(folder), expected))

    # ------------------------------------------------------------------------------------ the trainer's end of a push
    def coordinates(self) -> list[tuple[RankCoordinates, str]]:
        """Coordinates and host of every rank."""
        return list(zip(self._ranks.coordinates, self._ranks.hosts, strict=True))

    def padded_vocab_size(self) -> int:
        """Rows of the embedding over all tensor-parallel ranks."""
        return self._all("weight_sync", lambda actor: actor.padded_vocab_size())[0]

    def open_weight_store(self, deadline_s: float) -> tuple[str, int]:
        """Opens a store on rank 0's host that both sides of a push can reach; returns host and port."""
        return self._ranks.run_on_each("weight_sync", [lambda actor: actor.open_weight_store(deadline_s)])[0]

    def connect_weights(self, link: "WeightLink") -> None:
        """Opens the transport in every rank."""
        self._all("weight_sync", lambda actor: actor.connect_weights(link))

    # -------------------------------------------------------------------------------------------------------- results
    def _all(self, stage: str, function: "Callable[[MegatronActor], Result]") -> list[Result]:
        return self._ranks.run_on_each(stage, [function] * len(self._ranks.coordinates))

    def _shards(self, rollouts: RolloutHandle, updates: Sequence[Sequence[int]]) -> list[Callable[[], RolloutShard]]:
        """What fetches the shard of each rank."""
        parts = shards(rollouts, self._data_parallel_size, updates=updates)
        return [parts[rank.data_index] for rank in self._ranks.coordinates]

    def _reporting(self, results: Sequence[Result]) -> list[Result]:
        """The results of one rank of each group of equal ones."""
        return [result for result, rank in zip(results, self._ranks.coordinates, strict=True) if rank.reports]

    def _merged(self, reports: Sequence[Metrics]) -> Metrics:
        return merge_reports(reports, self._ranks.coordinates)


def merge_reports(reports: Sequence[Metrics], coordinates: Sequence[RankCoordinates]) -> Metrics:
    """Merges machine metrics of all ranks, and the other metrics of one rank of each group of equal ones."""
    return merge(
        report if rank.reports else {name: metric for name, metric in report.items() if not is_deterministic(name)}
        for report, rank in zip(reports, coordinates, strict=True)
    )
