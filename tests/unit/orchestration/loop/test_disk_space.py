"""A disk that is too small is named with numbers before the run."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from gtpo_megatron.config.algorithm import GRPOConfig, ReferenceConfig, ReferenceKLConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.orchestration.loop.disk_space import check_disk_space, checkpoint_bytes
from gtpo_megatron.weights.config_json import read_architecture
from recipes import tiny_cpu

NUM_PARAMETERS = 1_074_000  # about; Qwen2 of the quickstart


def config(*, dtype="float32", sharded=False, num_steps=40, **checkpoint):
    base = tiny_cpu.gtpo(num_steps=num_steps)
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, dtype=dtype),
        parallel=dataclasses.replace(base.parallel, distributed_optimizer=sharded),
        checkpoint=dataclasses.replace(base.checkpoint, **checkpoint),
    )


ARCHITECTURE = read_architecture(Path(tiny_cpu.gtpo().model.path))


@pytest.mark.parametrize(
    ("fields", "bytes_each"),
    [({}, 12), ({"sharded": True}, 16), ({"dtype": "bfloat16"}, 14), ({"dtype": "bfloat16", "sharded": True}, 14)],
)
def test_bytes_of_a_checkpoint(fields, bytes_each):
    assert checkpoint_bytes(config(**fields), ARCHITECTURE) == pytest.approx(NUM_PARAMETERS * bytes_each, rel=0.01)


def test_a_reference_that_is_reset_has_weights_of_its_own():
    kl = ReferenceKLConfig(coef=0.1)
    compared = dataclasses.replace(config(), algorithm=GRPOConfig(reference_kl=kl))
    assert checkpoint_bytes(compared, ARCHITECTURE) == checkpoint_bytes(config(), ARCHITECTURE)
    reset = dataclasses.replace(compared, reference=ReferenceConfig(reset_every_steps=5))
    assert checkpoint_bytes(reset, ARCHITECTURE) == pytest.approx(NUM_PARAMETERS * 16, rel=0.01)


@pytest.mark.parametrize(
    ("fields", "at_once"),
    [
        ({}, 3),  # two kept, one on its way
        ({"keep": 1, "keep_best": 3, "every_steps": 20}, 2),  # no more than are ever saved
        ({"keep": 1, "keep_best": 1, "every_steps": 10, "num_steps": 100}, 3),
        ({"every_steps": 0}, 1),
    ],
)
def test_what_is_on_the_disk_at_once_must_fit(tmp_path, monkeypatch, fields, at_once):
    base = config(export_hf=False, **fields)
    one = checkpoint_bytes(base, ARCHITECTURE)
    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free._replace(free=at_once * one))
    check_disk_space(base, ARCHITECTURE, tmp_path, used_bytes=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free._replace(free=at_once * one - 1))
    with pytest.raises(ConfigError, match=f"needs 0.0.: {at_once} checkpoints of 0.01 GiB at once .* choose another"):
        check_disk_space(base, ARCHITECTURE, tmp_path, used_bytes=0)
    check_disk_space(base, ARCHITECTURE, tmp_path, used_bytes=1)  # a resumed run replaces what it has


def test_the_export_counts_too(tmp_path, monkeypatch):
    base = config(every_steps=0)
    one = checkpoint_bytes(base, ARCHITECTURE)
    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free._replace(free=one + one // 4))
    with pytest.raises(ConfigError, match="for the export"):
        check_disk_space(base, ARCHITECTURE, tmp_path, used_bytes=0)
