"""``checkpoints/`` of a run: complete checkpoints, and pointers to the last and the best.

::

    checkpoints/step_N/{manifest.json, driver.json, *.distcp, .metadata, metadata.json, common.pt}
    checkpoints/step_N/unmeasured.json    where a stop has put the step's measurement off: its metrics so far
    checkpoints/latest   checkpoints/best

A checkpoint is written to a scratch folder and renamed when it is complete; then ``latest`` is replaced.
"""

import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gtpo_megatron.atomic_file import write_file
from gtpo_megatron.config.output import CheckpointConfig
from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.run_folder.manifest import Manifest, RunFacts, new_manifest, read_manifest
from gtpo_megatron.untrusted.fields import Fields, as_record
from gtpo_megatron.untrusted.json_text import find_json, read_json
from gtpo_megatron.untrusted.text import find_text, printable, shown
from gtpo_megatron.weights.megatron.checkpoint_files import (
    FORMAT,
    MANIFEST_FILE,
    FileEntry,
    Verify,
    check_files,
    file_checksum,
)

logger = logging.getLogger(__name__)

LATEST, BEST = "latest", "best"
DRIVER_FILE = "driver.json"
UNMEASURED_FILE = "unmeasured.json"

MAX_POINTER_BYTES = 4096

_NAME = re.compile(r"step_([0-9]{1,18})")
_PARTIAL = ".step_*.partial"


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverState:
    """The driver's part of a checkpoint.

    Responses that were sampled ahead are in another file of the checkpoint.

    Attributes:
        step: finished steps.
        sampler: the prompt sampler's position.
        counters: totals over the run, such as responses generated.
        mismatch: figures that the limits of the mismatch were learnt from.
    """

    step: int
    sampler: dict[str, Any]
    counters: dict[str, int]
    mismatch: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint to resume from.

    Attributes:
        path: folder of the checkpoint.
        state: the driver's state.
        manifest: None if it is missing and ``verify='none'``.
        unmeasured: the step's metrics, if a stop postponed its measurement: they are written after the measurement.
            None: nothing was postponed.
        note: a remark for the log; empty if ``latest`` names it.
    """

    path: Path
    state: DriverState
    manifest: Manifest | None
    unmeasured: dict[str, float] | None = None
    note: str = ""

    @property
    def last_row(self) -> int:
        """The last step whose row of metrics is kept on resume."""
        return self.state.step if self.unmeasured is None else self.state.step - 1


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        path: the folder; need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    # ---------------------------------------------------------------------------------------------------------- reading
    def latest(self, verify: Verify = "sizes") -> Checkpoint | None:
        """The last complete checkpoint, or None if there is none.

        It is the one that ``latest`` names; if this pointer is lost, the newest complete one, with a ``note``. Of
        shards only the sizes are compared here; readers compare checksums with ``verify='full'``.

        Raises:
            CheckpointError: the checkpoint that ``latest`` names is incomplete, or ``latest`` is lost and ambiguous;
                the message names others that seem complete.
        """
        folder, trouble = self._pointed()
        if folder is None:
            return self._newest_whole(trouble, verify)
        try:
            return _read(folder, verify)
        except CheckpointError as error:
            raise CheckpointError(f"{error}{self._remedy(folder.name)}") from error

    def _pointed(self) -> tuple[Path | None, str]:
        """The checkpoint that ``latest`` names, or None and the reason."""
        marker = self.path / LATEST
        try:
            text = find_text(marker, limit=MAX_POINTER_BYTES, error=CheckpointError)
        except CheckpointError as error:
            return None, str(error)
        if text is None:
            return None, f"{marker} is missing"
        name = text.strip()
        if not _NAME.fullmatch(name):
            return None, f"{marker} holds {shown(name)}, expected the name of a checkpoint, such as step_10"
        if not (self.path / name).is_dir():
            return None, f"{marker} names {name}, which is not there"
        return self.path / name, ""

    def _newest_whole(self, trouble: str, verify: Verify) -> Checkpoint | None:
        """The checkpoint of a lost pointer; None if there is neither a pointer nor a checkpoint."""
        numbered = self._numbered()
        if not numbered and not os.path.lexists(self.path / LATEST):
            return None
        found: list[Checkpoint] = []
        for _, folder in sorted(numbered.items()):
            with suppress(CheckpointError):
                found.append(_read(folder, verify))
        newest = found[-1] if found else None
        if newest is None or newest.state.step != max(numbered):
            is_not = (
                f"{numbered[max(numbered)].name}, the newest, is not whole" if numbered else "no checkpoint is there"
            )
            raise CheckpointError(f"{trouble}, and {is_not}{self._remedy('')}")
        written = [checkpoint.manifest.created for checkpoint in found if checkpoint.manifest]
        if newest.manifest and newest.manifest.created < max(written):
            raise CheckpointError(
                f"{trouble}, and {newest.path.name} is not the one that was written last: the run has gone two ways"
                f"{self._remedy('')}"
            )
        return replace(newest, note=f"{trouble}: {newest.path.name} is taken, the newest whole checkpoint")

    def _remedy(self, besides: str) -> str:
        """Names of the checkpoints whose manifest and small files agree, by step, and what to do with one of them."""
        whole = []
        for _, folder in sorted(self._numbered().items()):
            with suppress(CheckpointError):
                _read(folder, "sizes")
                whole.append(folder.name)
        names = ", ".join(name for name in whole if name != besides)
        return f"; whole are {names}: write one of these names into {self.path / LATEST}" if names else ""

    def _numbered(self) -> dict[int, Path]:
        if not self.path.is_dir():
            return {}
        return {
            int(match.group(1)): path
            for path in self.path.iterdir()
            if path.is_dir() and (match := _NAME.fullmatch(path.name))
        }

    @property
    def num_bytes(self) -> int:
        """Size of the folder, including checkpoints of killed saves."""
        return sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())

    # ---------------------------------------------------------------------------------------------------------- writing
    def begin(self, step: int) -> Path:
        """Creates an empty folder for the ranks, with a unique name: writers of a killed run cannot write to it."""
        scratch = self.path / f".step_{step}.{uuid.uuid4().hex[:8]}.partial"
        try:
            for left_over in self.path.glob(_PARTIAL):
                shutil.rmtree(left_over, ignore_errors=True)
            scratch.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"{scratch} cannot be made: {error.strerror}") from error
        return scratch

    def finish(
        self,
        scratch: Path,
        state: DriverState,
        *,
        run: RunFacts,
        checksums: Mapping[str, str],
        scores: Mapping[str, float],
        config: CheckpointConfig,
    ) -> Path:
        """Adds the driver's part and the manifest, renames the checkpoint, and removes those not to be kept.

        Args:
            scratch: the folder of ``begin`` with the ranks' files.
            state: the driver's state at the step's end.
            run: facts for the manifest.
            checksums: checksums of the ranks' files by name; those of other files are computed here.
            scores: held-out metrics of the step; empty if it was not measured.
            config: numbers of checkpoints that are kept.

        Raises:
            CheckpointError: the disk failed, or a file is missing; the last complete checkpoint stays valid.
        """
        final = self.path / f"step_{state.step}"
        try:
            write_file(scratch / DRIVER_FILE, json.dumps(asdict(state), indent=1))
            files = _files(scratch, checksums)
            manifest = new_manifest(run, step=state.step, scores=scores, files=files)
            write_file(scratch / MANIFEST_FILE, manifest.to_json())
            _sync_folder(scratch)
            if final.exists():  # a run that died after the rename writes this step again
                shutil.rmtree(final)
            scratch.rename(final)
            write_file(self.path / LATEST, final.name + "\n")
            _sync_folder(self.path)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {final} could not be finished: {error.strerror}; the last good one stays valid"
            ) from error
        self._drop(state.step, config)
        logger.info("checkpoint %s is complete: %.1f MiB", final, manifest.num_bytes / 2**20)
        return final

    def record_measurement(
        self, checkpoint: Checkpoint, *, scores: Mapping[str, float], config: CheckpointConfig
    ) -> None:
        """Adds held-out metrics that were measured after the checkpoint was saved.

        A checkpoint without a manifest (``verify='none'``) gets none, and is never the best.

        Raises:
            CheckpointError: the manifest could not be replaced; the measurement stays postponed.
        """
        folder, manifest = checkpoint.path, checkpoint.manifest
        try:
            if manifest is not None:
                files = {name: entry for name, entry in manifest.files.items() if name != UNMEASURED_FILE}
                write_file(
                    folder / MANIFEST_FILE, replace(manifest, format=FORMAT, scores=dict(scores), files=files).to_json()
                )
            else:
                logger.warning("%s was taken up unverified: its scores are in the metrics alone", folder)
            (folder / UNMEASURED_FILE).unlink()  # last, so that a crash before it repeats the measurement
            _sync_folder(folder)
        except OSError as error:
            raise CheckpointError(f"{folder} could not be given its scores: {error.strerror}") from error
        self._drop(checkpoint.state.step, config)

    def _drop(self, step: int, config: CheckpointConfig) -> None:
        """Removes all but the last and the best checkpoints up to this step, and later ones of an earlier run.

        The checkpoint just finished is never removed; failures to remove others, or to name the best, are only logged.
        """
        past = {number: path for number, path in self._numbered().items() if number <= step}
        kept = set(sorted(past)[-config.keep :])
        if config.keep_best:
            best = self._best_first(past, config.best_metric)[: config.keep_best]
            kept.update(best)
            if best:
                try:
                    write_file(self.path / BEST, f"step_{best[0]}\n")
                except OSError as error:
                    logger.warning("%s could not be written: %s", self.path / BEST, error)
        for number in sorted(past.keys() - kept):
            try:
                shutil.rmtree(past[number])
            except OSError as error:
                logger.warning("old checkpoint %s could not be removed: %s", past[number], error)

    @staticmethod
    def _best_first(folders: Mapping[int, Path], metric: str) -> list[int]:
        """Steps with a score, best first, and the earlier of equal ones first."""
        scores = {}
        for step, folder in folders.items():
            try:
                score = read_manifest(folder).scores.get(metric)
            except CheckpointError as error:
                logger.warning("not considered as the best: %s", error)
                continue
            if score is not None:
                scores[step] = score
        return sorted(scores, key=lambda step: (-scores[step], step))


def _read(folder: Path, verify: Verify) -> Checkpoint:
    """Reads a checkpoint; raises CheckpointError if it is incomplete."""
    manifest = None
    if verify != "none":
        manifest = read_manifest(folder)
        check_files(folder, manifest.files, "sizes")
    driver = folder / DRIVER_FILE
    state = as_record(DriverState, read_json(driver, error=CheckpointError), printable(driver), CheckpointError)
    return Checkpoint(path=folder, state=state, manifest=manifest, unmeasured=_unmeasured(folder / UNMEASURED_FILE))


def _unmeasured(path: Path) -> dict[str, float] | None:
    """The postponed metrics of a checkpoint, with NaN and infinities."""
    found = find_json(path, error=CheckpointError)
    if found is None:
        return None
    row = Fields(found, printable(path), CheckpointError).raw
    wrong = [name for name, value in row.items() if isinstance(value, bool) or not isinstance(value, int | float)]
    if wrong:
        raise CheckpointError(f"{path}: {printable(wrong[0])} is {shown(row[wrong[0]])}, expected a number")
    return row


def _files(folder: Path, checksums: Mapping[str, str]) -> dict[str, FileEntry]:
    """Entries of all files: with the ranks' checksums, or computed for the others, which are synced."""
    absent = sorted(name for name in checksums if not (folder / name).is_file())
    if absent:
        raise CheckpointError(
            f"{folder} lacks {', '.join(absent)}, which ranks have written; is the run folder on a file system that "
            f"all nodes share?"
        )
    entries = {}
    for path in sorted(folder.iterdir()):
        if path.name not in checksums:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        checksum = checksums.get(path.name) or file_checksum(path)
        entries[path.name] = FileEntry(num_bytes=path.stat().st_size, checksum=checksum)
    return entries


def _sync_folder(folder: Path) -> None:
    """Syncs a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
