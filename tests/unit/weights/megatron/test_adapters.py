"""Adapters in a checkpoint that somebody made or damaged: one line, and no memory for what it promises."""

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.weights.adapters import projections
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.megatron import adapters
from gtpo_megatron.weights.megatron.checkpoint_reader import load_whole
from recipes.tiny_cpu import ASSETS

ARCH = read_architecture(ASSETS / "tiny_qwen2")
PROJECTION = projections(ARCH)[0]
FOLDER = Path("checkpoint")


def index_of(rank, name=PROJECTION.name):
    """An index whose adapter of one projection says that it has this rank."""
    properties = TensorProperties(dtype=torch.float32)
    sizes = {"a": torch.Size([rank, PROJECTION.columns]), "b": torch.Size([PROJECTION.rows, rank])}
    entries = {
        f"{adapters.ADAPTERS_PREFIX}{name}.{part}": TensorStorageMetadata(properties, size, [])
        for part, size in sizes.items()
    }
    return Metadata(state_dict_metadata=entries)


@pytest.mark.parametrize(
    ("rank", "name"),
    [
        (2**40, PROJECTION.name),
        (2**62, PROJECTION.name),
        (0, PROJECTION.name),
        (-1, PROJECTION.name),
        (4, "model.layers.99.mlp.up_proj"),
        (4, "../x"),
    ],
)
def test_a_rank_or_a_name_that_cannot_be(monkeypatch, rank, name):
    monkeypatch.setattr(adapters, "load_index", lambda _: index_of(rank, name))
    with pytest.raises(CheckpointError, match="has shapes .* it is of another model"):
        adapters.stored_adapters(FOLDER, ARCH)


def test_a_tensor_without_its_parts(monkeypatch):
    """Else what memory happened to hold would be merged into a model."""
    with pytest.raises(CheckpointError, match="it has other parts than the whole"):
        load_whole(FOLDER, index_of(4), f"{adapters.ADAPTERS_PREFIX}{PROJECTION.name}.a")
    monkeypatch.setattr(adapters, "load_index", lambda _: index_of(4))
    with pytest.raises(CheckpointError, match="it has other parts than the whole"):
        adapters.stored_adapters(FOLDER, ARCH)


@pytest.mark.parametrize("tensor", [torch.tensor(float("nan")), torch.zeros([], dtype=torch.complex64)])
def test_values_that_are_no_weights(monkeypatch, tensor):
    monkeypatch.setattr(adapters, "load_index", lambda _: index_of(4))
    monkeypatch.setattr(adapters, "load_whole", lambda *_: tensor)
    with pytest.raises(CheckpointError, match="or holds NaN or infinity"):
        adapters.stored_adapters(FOLDER, ARCH)


@pytest.mark.parametrize(
    "common", [[], {}, {"reference": {"files": {}}}, {"adapters": {"scale": -1.0}}, {"adapters": {"scale": "x"}}]
)
def test_a_common_state_that_does_not_say_what_it_must(monkeypatch, common):
    monkeypatch.setattr(adapters, "load_index", lambda _: index_of(4))
    monkeypatch.setattr(adapters, "load_whole", lambda *_: torch.zeros([]))
    monkeypatch.setattr(adapters, "load_common", lambda *_: common)
    with pytest.raises(CheckpointError) as error:
        adapters.stored_adapters(FOLDER, ARCH)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("reference", [None, {}, {"files": {1: "a"}}, {"files": {"a": 1}}, {"files": "text"}])
def test_files_that_are_no_texts(reference):
    with pytest.raises(CheckpointError):
        adapters.file_checksums(reference, FOLDER)
