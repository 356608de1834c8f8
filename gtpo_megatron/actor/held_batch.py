"""The batch that a rank works on, from one stage of a step to the next."""

from gtpo_megatron.batch import ScoredBatch, TrainBatch
from gtpo_megatron.errors import StageOrderError


class HeldBatch:
    """Set by scoring, replaced by credit, read by the update and for sampled texts, gone after ``release``.

    A stage that raises leaves what the stage before it left. Scoring releases the batch of before when it begins, so
    that a rank never holds two.

    Attributes:
        batch: what the last stage left; None before scoring and after ``release``.
    """

    def __init__(self) -> None:
        self.batch: ScoredBatch | TrainBatch | None = None
        self._last_stage = "nothing"

    def keep(self, batch: ScoredBatch | TrainBatch, *, stage: str) -> None:
        """Holds what a stage left, in place of what it worked on."""
        self.batch, self._last_stage = batch, stage

    def release(self) -> None:
        """Lets the batch go."""
        self.batch, self._last_stage = None, "release_batch"

    def scored(self, stage: str) -> ScoredBatch:
        """For a stage that comes right after scoring.

        Raises:
            StageOrderError: another stage came before.
        """
        if not isinstance(self.batch, ScoredBatch):
            raise self._out_of_order(stage, needed="score_tokens or use_sampler_scores")
        return self.batch

    def any_scored(self, stage: str) -> ScoredBatch:
        """The responses with their scores, for what may come at any time after scoring.

        Raises:
            StageOrderError: none are held.
        """
        if self.batch is None:
            raise self._out_of_order(stage, needed="score_tokens or use_sampler_scores")
        return self.batch if isinstance(self.batch, ScoredBatch) else self.batch.scored

    def credited(self, stage: str, *, after: tuple[str, ...] = ("assign_credit",)) -> TrainBatch:
        """For a stage that comes after credit.

        Args:
            stage: that asks.
            after: stages that may have been the last one.

        Raises:
            StageOrderError: another stage came before.
        """
        if not isinstance(self.batch, TrainBatch) or self._last_stage not in after:
            raise self._out_of_order(stage, needed=" or ".join(after))
        return self.batch

    def _out_of_order(self, stage: str, *, needed: str) -> StageOrderError:
        return StageOrderError(f"{stage} needs the batch that {needed} leaves, but {self._last_stage} came before it")
