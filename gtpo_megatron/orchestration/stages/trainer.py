"""(4) to (9), the trainer: what each stage asks of all Megatron ranks, and how their results become one.

A stage is a call of ``MegatronActor`` on every rank at once, since it may contain collectives. Where the ranks are is
no concern here: :class:`Ranks` reaches them over Ray (``on_ray/ranks.py``) or in this process (``in_process.py``).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from gtpo_megatron.batch import RewardBatch, RolloutBatch, RolloutShard, TrainBatch
from gtpo_megatron.data.sharding import shard_contiguous
from gtpo_megatron.distributed.groups import RankCoordinates
from gtpo_megatron.mismatch.gap_report import GapReport, merge_gaps
from gtpo_megatron.observability.metrics import Metric, is_deterministic, merge
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle, shards

if TYPE_CHECKING:
    from gtpo_megatron.actor.actor import MegatronActor

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

    Attributes:
        ranks: way to call them one by one, and where they are.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._data_parallel_size = 1 + max(rank.data_index for rank in ranks.coordinates)

    def run_on_all(self, stage: str, function: "Callable[[MegatronActor], Result]") -> list[Result]:
        """Calls a function on all ranks at once; see ``Ranks``."""
        return self.ranks.run_on_each(stage, [function] * len(self.ranks.coordinates))

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
            self.ranks.run_on_each("score", [score(fetch) for fetch in self._shards(rollouts, updates)])
        )

    def use_sampler_scores(self, rollouts: RolloutHandle, *, updates: Sequence[Sequence[int]] = ()) -> Metrics:
        """Takes the sampler's log-probs and entropies as the old policy's, without a forward pass."""

        def take(fetch: Callable[[], RolloutShard]) -> "Callable[[MegatronActor], Metrics]":
            return lambda actor: actor.use_sampler_scores(fetch())

        return self._merged(self.ranks.run_on_each("score", [take(fetch) for fetch in self._shards(rollouts, updates)]))

    def credit_tokens(self, rewards: RewardBatch) -> Metrics:
        """Shaped rewards and advantages of the scored batch; they do not depend on the sharding."""
        # each rank gets a copy, and credit reads no parts and no texts, which can be megabytes
        needed = replace(rewards, parts={}, info=())
        return self._merged(self.run_on_all("credit", lambda actor: actor.credit_tokens(needed)))

    def update(self, *, step: int) -> Metrics:
        """The optimizer updates of a step."""
        return self._merged(self.run_on_all("update", lambda actor: actor.update(step)))

    # -------------------------------------------------------------------------------------------- given conversations
    def fit(self, batch: RolloutBatch, *, step: int) -> Metrics:
        """The update of a step of supervised fine-tuning; the replicas get about equally many tokens."""
        num_tokens = int(batch.own_lengths.sum())

        def update(rows: RolloutBatch) -> "Callable[[MegatronActor], Metrics]":
            return lambda actor: actor.fit(rows, num_tokens=num_tokens, step=step)

        return self._merged(self.ranks.run_on_each("update", [update(rows) for rows in self._shares(batch)]))

    def heldout_loss(self, batch: RolloutBatch) -> Metrics:
        """The loss of conversations that are not trained."""

        def measure(rows: RolloutBatch) -> "Callable[[MegatronActor], Metrics]":
            return lambda actor: actor.heldout_loss(rows)

        return self._merged(self.ranks.run_on_each("evaluation", [measure(rows) for rows in self._shares(batch)]))

    def _shares(self, batch: RolloutBatch) -> list[RolloutBatch]:
        """The rows of each rank, which ranks of one replica share."""
        parts = shard_contiguous(batch.sequence_tokens.tolist(), self._data_parallel_size)
        shares = [batch.select(rows) for rows in parts]
        return [shares[rank.data_index] for rank in self.ranks.coordinates]

    # -------------------------------------------------------------------------------------- -- looking at the batch
    def rows_of_groups(self, group_ids: Sequence[int]) -> list[TrainBatch]:
        """The responses of the chosen groups with entropies and credit, those of each replica together."""
        chosen = list(group_ids)
        parts = self.run_on_all("sampled texts", lambda actor: actor.rows_of_groups(chosen))
        return [part for part in parts if part is not None]

    def explain_gap(self, typical_nats: float) -> GapReport:
        """Where the log-prob gaps of the responses are; after scoring, or after an update without it."""
        return merge_gaps(self._reporting(self.run_on_all("score", lambda actor: actor.explain_gap(typical_nats))))

    # -------------------------------------------------------------------------------------------------------- results
    def _shards(self, rollouts: RolloutHandle, updates: Sequence[Sequence[int]]) -> list[Callable[[], RolloutShard]]:
        """What fetches the shard of each rank."""
        parts = shards(rollouts, self._data_parallel_size, updates=updates)
        return [parts[rank.data_index] for rank in self.ranks.coordinates]

    def _reporting(self, results: Sequence[Result]) -> list[Result]:
        """The results of one rank of each group of equal ones."""
        return [result for result, rank in zip(results, self.ranks.coordinates, strict=True) if rank.reports]

    def _merged(self, reports: Sequence[Metrics]) -> Metrics:
        return merge_reports(reports, self.ranks.coordinates)


def merge_reports(reports: Sequence[Metrics], coordinates: Sequence[RankCoordinates]) -> Metrics:
    """Merges machine metrics of all ranks, and the other metrics of one rank of each group of equal ones."""
    return merge(
        report if rank.reports else {name: metric for name, metric in report.items() if not is_deterministic(name)}
        for report, rank in zip(reports, coordinates, strict=True)
    )
