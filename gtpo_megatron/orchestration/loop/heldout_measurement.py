"""Accuracy on the held-out sets, measured with the run's own sampler and graders."""

from collections.abc import Callable, Sequence

from gtpo_megatron.batch import PromptBatch, RewardBatch
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.evaluation.evaluator import HeldOutResult, HeldOutSet, evaluate
from gtpo_megatron.observability.measured_sets import set_name
from gtpo_megatron.observability.progress import TrainingDisplay
from gtpo_megatron.orchestration.loop.pipeline import RolloutPipeline
from gtpo_megatron.orchestration.stages.stages import Stages


class HeldOutMeasurement:
    """Measures all held-out sets, one after the other.

    Args:
        config: the run's configuration.
        sets: the held-out sets.
        stages: the engine and the rewards are used.
        pipeline: drained before a measurement.
        display: shows the results.
        is_asked_to_stop: called before every set, since all sets together can take far longer than a batch system
            warns before it ends a job.
    """

    def __init__(
        self,
        config: RunConfig,
        sets: Sequence[HeldOutSet],
        stages: Stages,
        pipeline: RolloutPipeline,
        display: TrainingDisplay,
        *,
        is_asked_to_stop: Callable[[], bool],
    ) -> None:
        self._config = config.evaluation
        self._threshold = config.algorithm.success_threshold
        self._sets = sets
        self._stages = stages
        self._pipeline = pipeline
        self._display = display
        self._is_asked_to_stop = is_asked_to_stop

    @property
    def size(self) -> str:
        """How much a measurement is, such as ``256 problems x 8``."""
        return f"{sum(len(one.problems) for one in self._sets)} problems x {self._config.samples}"

    def measure(self) -> tuple[HeldOutResult, ...] | None:
        """Accuracy on every set; None if the run was asked to stop before the last set was begun."""
        self._pipeline.drain()  # no request in flight may use the prefix cache, which is emptied
        results: list[HeldOutResult] = []
        with self._stages.timers.stage("evaluation"):
            for number, heldout in enumerate(self._sets, start=1):
                if self._is_asked_to_stop():
                    return None
                if len(self._sets) > 1:
                    self._display.stage(f"evaluation of {set_name(heldout.label)}, {number} of {len(self._sets)} sets")
                results.append(evaluate(heldout, self._config, self._sample_and_grade, threshold=self._threshold))
            # a resumed run does not measure again, so a measurement must not change the sampler
            self._stages.engine.forget_prefixes()
        for result in results:
            self._display.note(str(result))
            if result.num_failed:
                self._display.note(
                    f"{result.num_failed} {result.label} responses have no verdict and count as wrong: "
                    f"{result.commonest_failure or 'log.txt says why'}"
                )
            if result.num_ungraded:
                self._display.note(
                    f"{result.num_ungraded} {result.label} episodes were ended by a limit before they were graded, and "
                    f"have reward 0"
                )
        return tuple(results)

    def contamination(self) -> dict[str, float]:
        """Metrics: the number of problems of each set that are in the training set."""
        return {f"eval/{heldout.label}_contaminated_count": float(heldout.num_contaminated) for heldout in self._sets}

    def _sample_and_grade(self, prompts: PromptBatch) -> RewardBatch:
        rollouts = self._stages.engine.generate(
            prompts, self._config.sampling, samples_per_prompt=self._config.samples, seed=self._config.seed
        )
        return self._stages.grade(rollouts, prompts)
