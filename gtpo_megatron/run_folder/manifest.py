"""``manifest.json`` of a checkpoint: facts about the run, and size and checksum of every file. Written last."""

import datetime
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gtpo_megatron.config.serialize import AnyConfig, to_plain, to_yaml
from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.run_folder.provenance import commit, versions
from gtpo_megatron.untrusted.fields import as_record
from gtpo_megatron.untrusted.text import printable
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.megatron.checkpoint_files import (
    ALGORITHM,
    FORMAT,
    MANIFEST_FILE,
    FileEntry,
    files_of,
    read_sealed,
    sealed,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Facts about a run in the manifests of its checkpoints.

    Attributes:
        name: name of the run.
        config_fingerprint: SHA-256 of the resolved configuration as YAML, 16 digits.
        architecture: fields of the model's architecture.
        dtype: dtype of the weights.
        layout: the fields of ``ParallelConfig``.
        versions: versions of installed distributions.
        commit: commit of this package's checkout.
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
    """The content of ``manifest.json``.

    Attributes:
        format: version of the format; later ones are refused.
        step: finished steps.
        policy_version: version of the weights.
        created: time at which the checkpoint was finished, UTC, ISO 8601.
        checksum_algorithm: algorithm of all checksums.
        run: facts about the run.
        scores: held-out metrics of the step; empty if it was not measured.
        files: entries by name.
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
        """Size of all files."""
        return sum(entry.num_bytes for entry in self.files.values())

    @property
    def checksums(self) -> dict[str, str]:
        """Checksums by file name."""
        return {name: entry.checksum for name, entry in self.files.items()}

    def to_json(self) -> str:
        """The text of the file, with its own checksum."""
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


def run_facts(config: AnyConfig, architecture: Architecture) -> RunFacts:
    """The facts about a run."""
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
        CheckpointError: it is missing or damaged, or has a later format.
    """
    raw = read_sealed(folder)
    files_of(raw, folder)  # also checks the names
    return as_record(Manifest, raw, printable(folder / MANIFEST_FILE), CheckpointError)


def check_model(folder: Path, manifest: Manifest, run: RunFacts) -> None:
    """Raises CheckpointError if the checkpoint is of another model than the run's."""
    there, here = manifest.run.architecture, run.architecture
    differing = [
        f"{key} {there.get(key)!r}, here {here.get(key)!r}"
        for key in sorted(there.keys() & here.keys())  # a later version may have more keys
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
        for key in sorted(there.keys() & here.keys())  # a later version may have more keys
        if there.get(key) != here.get(key)
    ]


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values after a round trip through JSON, for comparison."""
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain
