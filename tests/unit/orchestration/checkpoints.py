"""Checkpoints as a run leaves them, with made-up contents."""

import atexit
import dataclasses
import functools
import shutil
import tempfile
from pathlib import Path

from gtpo_megatron.config.output import CheckpointConfig
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.run_folder.checkpoints import CheckpointFolder, DriverState
from gtpo_megatron.run_folder.manifest import RunFacts, run_facts
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.conversion import ConversionProgress, hf_to_megatron
from gtpo_megatron.weights.megatron.checkpoint_files import MEGATRON_FOLDER, file_checksum
from recipes import tiny_cpu
from recipes.tiny_cpu import ASSETS

MODEL = ASSETS / "tiny_qwen2"

METRIC = "eval/heldout_mean_at_k"


def facts(**changes) -> RunFacts:
    config = tiny_cpu.gtpo()
    return dataclasses.replace(run_facts(config, read_architecture(Path(config.model.path))), **changes)


def state(step: int) -> DriverState:
    return DriverState(
        step=step, sampler={"epoch": 0, "position": step}, counters={"responses": 8 * step}, mismatch={"samples": []}
    )


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


@functools.cache
def _converted() -> Path:
    """The tiny model as ranks write it; kept until the process ends."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    hf_to_megatron(MODEL, folder / "model", ParallelConfig(num_ranks=1), progress=ConversionProgress())
    return folder / "model" / MEGATRON_FOLDER


def save_model(folder: CheckpointFolder, step: int, **config) -> Path:
    """A checkpoint of the tiny model, which converts."""
    scratch = folder.begin(step)
    shutil.copytree(_converted(), scratch, dirs_exist_ok=True)
    shards = {path.name: file_checksum(path) for path in scratch.glob("*.distcp")}
    kept = CheckpointConfig(**config)
    return folder.finish(scratch, state(step), run=facts(), checksums=shards, scores={}, config=kept)


def flip(path: Path, bit: int | None = None) -> None:
    """One bit, of the byte in the middle or counted from the file's start."""
    content = bytearray(path.read_bytes())
    bit = len(content) // 2 * 8 if bit is None else bit
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def names(folder: CheckpointFolder) -> list[str]:
    return sorted(path.name for path in folder.path.iterdir() if path.is_dir())
