"""Saves a run while it goes on, and restores it: the ranks' part and the driver's as one."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from gtpo_megatron.config.checkpoint import CheckpointConfig
from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.orchestration.stages.protocols import Actor
from gtpo_megatron.run_folder.checkpoints import Checkpoint, CheckpointFolder, DriverState
from gtpo_megatron.run_folder.manifest import RunFacts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A checkpoint that ranks are writing."""

    scratch: Path
    state: DriverState
    scores: dict[str, float]


class CheckpointSaver:
    """At most one checkpoint is on its way; as a context, this waits for it at a good end and drops it at a bad one.

    First the ranks write, then a thread here adds the driver's part, names the checkpoint and drops old ones: syncing
    and removing files takes the disk's time, for which no step should wait.

    Args:
        config: of the checkpoints.
        folder: where they go.
        run: for the manifests.
        actor: the ranks.
    """

    def __init__(self, config: CheckpointConfig, folder: CheckpointFolder, run: RunFacts, actor: Actor) -> None:
        self._config = config
        self._folder = folder
        self._run = run
        self._actor = actor
        self._pending: _Pending | None = None
        self._naming: Future[Path] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")

    def save(
        self, state: DriverState, scores: Mapping[str, float], *, write_more: Callable[[Path], None] | None = None
    ) -> None:
        """Starts to save a finished step; waits for the one before, and for this one unless saving is asynchronous.

        Args:
            state: of the driver; must not change any more.
            scores: held-out metrics of the step; empty where it was not measured.
            write_more: adds files of the driver's to the checkpoint's folder.

        Raises:
            CheckpointError: this checkpoint or the one before could not be written; the last good one stays valid.
        """
        self._look_for_metric(state.step, scores)
        self.finish()
        scratch = self._folder.begin(state.step)
        if write_more is not None:
            try:
                write_more(scratch)
            except (OSError, RuntimeError) as error:  # torch raises RuntimeError where the disk is full
                raise CheckpointError(f"{scratch} could not be written: {error}; the last good one stays") from error
        self._actor.begin_save(scratch, in_background=self._config.async_save)
        self._pending = _Pending(scratch, state, dict(scores))
        if not self._config.async_save:
            self.finish()

    def settle(self, checkpoint: Checkpoint, scores: Mapping[str, float]) -> None:
        """Adds the held-out metrics of a saved step, whose measurement had been put off.

        Raises:
            CheckpointError: the checkpoint could not be changed.
        """
        self._look_for_metric(checkpoint.state.step, scores)
        self._folder.settle(checkpoint, scores=scores, config=self._config)

    def poll(self) -> None:
        """At a step's end: goes on with the checkpoint as far as it is without waiting.

        Raises:
            CheckpointError: it could not be written; the last good one stays valid.
        """
        if self._pending is not None and self._actor.is_save_written():
            self._collect()
        if self._naming is not None and self._naming.done():
            self._name()

    def finish(self) -> None:
        """Waits for the checkpoint that is on its way, if any, until it has its name.

        Raises:
            CheckpointError: it could not be written; the last good one stays valid.
        """
        if self._pending is not None:
            self._collect()
        if self._naming is not None:
            self._name()

    def _collect(self) -> None:
        """All ranks have written, or this waits for them."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        self._naming = self._thread.submit(
            self._folder.finish,
            pending.scratch,
            pending.state,
            run=self._run,
            checksums=self._actor.finish_save(),
            scores=pending.scores,
            config=self._config,
        )

    def _name(self) -> None:
        assert self._naming is not None
        naming, self._naming = self._naming, None
        naming.result()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Brings the ranks back to a checkpoint.

        Raises:
            CheckpointError: it is damaged, or of another model.
        """
        manifest = checkpoint.manifest if self._config.verify == "full" else None
        self._actor.load(checkpoint.path, checksums=manifest.checksums if manifest else {})
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
            self._thread.shutdown()  # what all ranks have written gets its name, however this ends
