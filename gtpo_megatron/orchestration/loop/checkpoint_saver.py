"""Saves and restores checkpoints, each of the ranks' part and the driver's part."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from gtpo_megatron.config.output import CheckpointConfig
from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.orchestration.stages.trainer import Trainer
from gtpo_megatron.run_folder.checkpoints import Checkpoint, CheckpointFolder, DriverState
from gtpo_megatron.run_folder.manifest import RunFacts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A checkpoint that the ranks are writing."""

    scratch: Path
    state: DriverState
    scores: dict[str, float]


class CheckpointSaver:
    """Saves one checkpoint at a time; as a context manager it waits for a pending one unless an error is raised.

    After the ranks have written, a background thread adds the driver's part, renames the checkpoint to its final name
    and removes old ones.

    Args:
        config: the checkpoint settings.
        folder: the folder of checkpoints.
        run: facts for the manifests.
        trainer: the ranks.
    """

    def __init__(self, config: CheckpointConfig, folder: CheckpointFolder, run: RunFacts, trainer: Trainer) -> None:
        self._config = config
        self._folder = folder
        self._run = run
        self._trainer = trainer
        self._pending: _Pending | None = None
        self._naming: Future[Path] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")

    def save(
        self, state: DriverState, scores: Mapping[str, float], *, write_more: Callable[[Path], None] | None = None
    ) -> None:
        """Starts to save a finished step, after the previous save; waits for it unless saving is asynchronous.

        Args:
            state: the driver's state; must not change afterwards.
            scores: held-out metrics of the step; empty if it was not measured.
            write_more: adds the driver's files to the checkpoint's folder.

        Raises:
            CheckpointError: this or the previous checkpoint could not be written; the last complete one stays valid.
        """
        self._look_for_metric(state.step, scores)
        self.finish()
        scratch = self._folder.begin(state.step)
        if write_more is not None:
            try:
                write_more(scratch)
            except (OSError, RuntimeError) as error:  # torch raises RuntimeError if the disk is full
                raise CheckpointError(f"{scratch} could not be written: {error}; the last good one stays") from error
        in_background = self._config.async_save
        self._trainer.run_on_all(
            "checkpoint", lambda actor: actor.checkpoint.begin(scratch, in_background=in_background)
        )
        self._pending = _Pending(scratch, state, dict(scores))
        if not self._config.async_save:
            self.finish()

    def record_measurement(self, checkpoint: Checkpoint, scores: Mapping[str, float]) -> None:
        """Adds held-out metrics that were measured after the checkpoint was saved.

        Raises:
            CheckpointError: the checkpoint could not be changed.
        """
        self._look_for_metric(checkpoint.state.step, scores)
        self._folder.record_measurement(checkpoint, scores=scores, config=self._config)

    def poll(self) -> None:
        """Advances a pending checkpoint without waiting; called after each step.

        Raises:
            CheckpointError: it could not be written; the last complete one stays valid.
        """
        if self._pending is not None and all(
            self._trainer.run_on_all("checkpoint", lambda actor: actor.checkpoint.is_written())
        ):
            self._collect()
        if self._naming is not None and self._naming.done():
            self._name()

    def finish(self) -> None:
        """Waits until a pending checkpoint is complete.

        Raises:
            CheckpointError: it could not be written; the last complete one stays valid.
        """
        if self._pending is not None:
            self._collect()
        if self._naming is not None:
            self._name()

    def _collect(self) -> None:
        """Waits for the ranks, then starts the background part."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        parts = self._trainer.run_on_all("checkpoint", lambda actor: actor.checkpoint.finish())
        self._naming = self._thread.submit(
            self._folder.finish,
            pending.scratch,
            pending.state,
            run=self._run,
            checksums={name: checksum for part in parts for name, checksum in part.items()},
            scores=pending.scores,
            config=self._config,
        )

    def _name(self) -> None:
        assert self._naming is not None
        naming, self._naming = self._naming, None
        naming.result()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restores the ranks from a checkpoint.

        Raises:
            CheckpointError: it is damaged, or of another model.
        """
        manifest = checkpoint.manifest if self._config.verify == "full" else None
        folder, checksums = checkpoint.path, dict(manifest.checksums) if manifest else {}
        self._trainer.run_on_all("checkpoint", lambda actor: actor.checkpoint.load(folder, checksums=checksums))
        logger.info("restored %s", checkpoint.path)

    def _look_for_metric(self, step: int, scores: Mapping[str, float]) -> None:
        if self._config.keep_best and scores and self._config.best_metric not in scores:
            logger.warning(
                "step %d counts for no checkpoint.keep_best: checkpoint.best_metric=%r is none of its measurements, %s",
                step,
                self._config.best_metric,
                ", ".join(sorted(scores)),
            )

    def __enter__(self) -> "CheckpointSaver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self._thread.shutdown()  # a checkpoint that all ranks have written is completed in any case
