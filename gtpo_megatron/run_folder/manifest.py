"""``manifest.json`` of a checkpoint: what it is of, and every file in it with size and checksum. Written last."""

import datetime
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.config.serialize import to_plain, to_yaml
from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.run_folder.provenance import commit, versions
from gtpo_megatron.untrusted.fields import as_record
from gtpo_megatron.untrusted.text import printable
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.file_checksum import ALGORITHM
from gtpo_megatron.weights.megatron.checkpoint_files import (
    FORMAT,
    MANIFEST_FILE,
    FileEntry,
    files_of,
    read_sealed,
    sealed,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What every checkpoint of a run says about it.

    Attributes:
        name: of the recipe.
        config_fingerprint: SHA-256 of the resolved configuration as YAML, 16 digits.
        architecture: of the model, field by field.
        dtype: of its weights.
        layout: the fields of ``ParallelConfig``.
        versions: of what computes, by distribution.
        commit: of this package's checkout.
    """

    name: str
    config_fingerprint: str
    architecture: dict[str, Any]
    dtype: str
    layout: dict[str, Any]
    versions: dict[str, str]
    commit: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The whole of ``manifest.json``.

    Attributes:
        format: of this file; readers refuse a later one.
        step: finished steps.
        policy_version: of the weights.
        created: when the checkpoint was finished, UTC, ISO 8601.
        checksum_algorithm: of all files.
        run: see ``RunFacts``.
        scores: held-out metrics of the step; empty where it was not measured.
        files: by name.
    """

    format: int = FORMAT
    step: int
    policy_version: int
    created: str
    checksum_algorithm: str = ALGORITHM
    run: RunFacts
    scores: dict[str, float]
    files: dict[str, FileEntry]

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(entry.num_bytes for entry in self.files.values())

    @property
    def checksums(self) -> dict[str, str]:
        """By file name."""
        return {name: entry.checksum for name, entry in self.files.items()}

    def to_json(self) -> str:
        """For people and programs; with its own checksum."""
        return sealed(asdict(self))


def new_manifest(run: RunFacts, *, step: int, scores: Mapping[str, float], files: Mapping[str, FileEntry]) -> Manifest:
    """The manifest of a checkpoint that is finished now; a step's weights are the policy of its number."""
    return Manifest(
        step=step,
        policy_version=step,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        run=run,
        scores={name: score for name, score in scores.items() if math.isfinite(score)},
        files=dict(files),
    )


def run_facts(config: RunConfig, architecture: Architecture) -> RunFacts:
    """What this run's checkpoints say about it."""
    return RunFacts(
        name=config.name,
        config_fingerprint=hashlib.sha256(to_yaml(config).encode()).hexdigest()[:16],
        architecture=_as_json(asdict(architecture)),
        dtype=config.model.dtype,
        layout=_as_json(to_plain(config.parallel)),
        versions=versions(),
        commit=commit(),
    )


def read_manifest(folder: Path) -> Manifest:
    """Reads a checkpoint's manifest.

    Raises:
        CheckpointError: there is none, it is damaged, or a later version wrote it.
    """
    raw = read_sealed(folder)
    files_of(raw, folder)  # names are checked there
    return as_record(Manifest, raw, printable(folder / MANIFEST_FILE), CheckpointError)


def check_model(folder: Path, manifest: Manifest, run: RunFacts) -> None:
    """Raises CheckpointError where the checkpoint is of another model than the run's."""
    there, here = manifest.run.architecture, run.architecture
    differing = [
        f"{key} {there.get(key)!r}, here {here.get(key)!r}"
        for key in sorted(there.keys() & here.keys())  # a later version may know more
        if there.get(key) != here.get(key)
    ]
    if manifest.run.dtype != run.dtype:
        differing.append(f"dtype {manifest.run.dtype!r}, here {run.dtype!r}")
    if differing:
        raise CheckpointError(
            f"checkpoint {folder} is of another model: {'; '.join(differing)}; resume with the model it was made with"
        )


def layout_changes(manifest: Manifest, run: RunFacts) -> list[str]:
    """The fields of the layout in which a checkpoint and a run differ, as ``field: there -> here``."""
    there, here = manifest.run.layout, run.layout
    return [
        f"{key}: {there.get(key)!r} -> {here.get(key)!r}"
        for key in sorted(there.keys() & here.keys())  # a later version may know more
        if there.get(key) != here.get(key)
    ]


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """As they come back from the file, so that both can be compared."""
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain
