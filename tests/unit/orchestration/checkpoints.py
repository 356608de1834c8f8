"""Checkpoints as a run leaves them, with made-up contents."""

import dataclasses
from pathlib import Path

from gtpo_megatron.config.checkpoint import CheckpointConfig
from gtpo_megatron.orchestration.checkpoint_folder import CheckpointFolder, DriverState
from gtpo_megatron.orchestration.manifest import RunFacts, run_facts
from gtpo_megatron.weights.architecture import read_architecture
from gtpo_megatron.weights.file_checksum import file_checksum
from recipes import tiny_cpu

METRIC = "eval/heldout_mean_at_k"


def facts(**changes) -> RunFacts:
    config = tiny_cpu.gtpo()
    return dataclasses.replace(run_facts(config, read_architecture(Path(config.model.path))), **changes)


def state(step: int) -> DriverState:
    return DriverState(step=step, sampler={"epoch": 0, "position": step}, counters={"responses": 8 * step})


def save(folder: CheckpointFolder, step: int, *, score: float | None = None, **config) -> Path:
    """One rank's file of a hundred bytes, then the rest as the driver adds it."""
    scratch = folder.begin(step)
    shard = scratch / "__0_0.distcp"
    shard.write_bytes(bytes([step % 256]) * 100)
    (scratch / "metadata.json").write_text("{}", encoding="utf-8")
    return folder.finish(
        scratch,
        state(step),
        run=facts(),
        checksums={shard.name: file_checksum(shard)},
        scores={} if score is None else {METRIC: score},
        config=CheckpointConfig(**config),
    )


def names(folder: CheckpointFolder) -> list[str]:
    return sorted(path.name for path in folder.path.iterdir() if path.is_dir())
