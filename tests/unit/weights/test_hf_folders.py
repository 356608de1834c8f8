"""Hugging Face folders, read slice by slice and written aside."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gtpo_megatron.errors import CheckpointError, ConfigError, WeightMappingError
from gtpo_megatron.weights.hf.reader import WeightFolder, is_finite, read_parameters, weight_files
from gtpo_megatron.weights.hf.writer import copy_companions, written_aside
from gtpo_megatron.weights.param_mapping import Box, SliceCopy

SHAPES = {"matrix": (5, 3), "vector": (7,)}
IDENTITY = [
    SliceCopy("m", Box(0, 5, 0, 3), "matrix", Box(0, 5, 0, 3)),
    SliceCopy("v", Box(0, 7, 0, 1), "vector", Box(0, 7, 0, 1)),
]


def test_slices_come_from_whichever_file_holds_them(tmp_path):
    tensors = {"matrix": torch.randn(5, 3), "vector": torch.randn(7)}
    for i, (name, tensor) in enumerate(tensors.items()):
        save_file({name: tensor}, tmp_path / f"part{i}.safetensors")
    index = {"weight_map": {"matrix": "part0.safetensors", "vector": "part1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    plan = [
        SliceCopy("m", Box(0, 2, 0, 2), "matrix", Box(3, 2, 1, 2)),
        SliceCopy("v", Box(1, 3, 0, 1), "vector", Box(4, 3, 0, 1)),
    ]
    parameters = {"m": torch.full((3, 2), 9.0), "v": torch.full((4,), 9.0)}
    read_parameters(tmp_path, SHAPES, plan, parameters)
    assert torch.equal(parameters["m"][:2], tensors["matrix"][3:, 1:])
    assert (parameters["m"][2] == 0).all()  # rows that no tensor fills only pad
    assert torch.equal(parameters["v"], torch.cat([torch.zeros(1), tensors["vector"][4:]]))


def test_a_folder_without_weights_says_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match="has no weights: neither model.safetensors nor"):
        weight_files(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(ConfigError, match="cannot be read"):
        WeightFolder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {"matrix": "gone.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ConfigError, match="names gone.safetensors, not in the folder"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", "it has pytorch_model.bin, which is not read: .*save_pretrained it, which writes"),
        ("model-00001-of-00002.safetensors", "it has model-00001-of-00002.* .1 such files.: fetch the index"),
    ],
)
def test_a_folder_of_other_files_is_told_which(tmp_path, name, message):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ConfigError, match=message):
        weight_files(tmp_path)


def test_two_sets_of_weights_are_refused_whichever_is_meant(tmp_path):
    """Transformers takes ``model.safetensors``, and the old shards were trained."""
    indexed(tmp_path, {"matrix": "part0.safetensors"})
    assert weight_files(tmp_path) == [tmp_path / "part0.safetensors"]
    save_file({"matrix": torch.randn(5, 3)}, tmp_path / "model.safetensors")
    said = r"two sets of weights: model\.safetensors, .* part0\.safetensors of model\.safetensors\.index\.json .*remove"
    with pytest.raises(ConfigError, match=said):
        weight_files(tmp_path)
    with pytest.raises(ConfigError, match=said):
        WeightFolder(tmp_path)
    (tmp_path / "part0.safetensors").unlink()  # the index alone is left of the old ones
    with pytest.raises(ConfigError, match=said):
        weight_files(tmp_path)
    indexed(tmp_path, {"matrix": "model.safetensors"})
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_adapters_beside_weights_are_refused(tmp_path):
    """Transformers loads both."""
    save_file({"matrix": torch.randn(5, 3)}, tmp_path / "model.safetensors")
    assert weight_files(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"has adapter_config\.json: .* merge them .* name that in adapter\.path"):
        WeightFolder(tmp_path)


def indexed(folder, weight_map):
    save_file({"matrix": torch.randn(5, 3)}, folder / "part0.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


@pytest.mark.parametrize("name", ["../part0.safetensors", "/etc/passwd", "..", "", "x\0y", "a/b", "part0\n"])
def test_an_index_leads_to_no_other_folder(tmp_path, monkeypatch, name):
    folder = tmp_path / "model"
    folder.mkdir()
    indexed(folder, {"matrix": name})
    (tmp_path / "part0.safetensors").write_bytes((folder / "part0.safetensors").read_bytes())
    monkeypatch.setattr("gtpo_megatron.weights.hf.reader.safe_open", None)  # nothing is opened
    with pytest.raises(ConfigError, match=r"index\.json: weight_map: got .*, expected a"):
        weight_files(folder)


@pytest.mark.parametrize(
    "weight_map", [[], ["matrix"], {"matrix": 1}, {"matrix": None}, {"matrix": ["x"]}, {}, None, "x"]
)
def test_an_index_of_another_kind_is_named(tmp_path, weight_map):
    indexed(tmp_path, weight_map)
    with pytest.raises(ConfigError, match=r"index\.json: .*weight_map"):
        weight_files(tmp_path)


def test_a_shard_that_may_not_be_read_is_not_called_missing(tmp_path, monkeypatch):
    indexed(tmp_path, {"matrix": "part0.safetensors"})

    def forbidden(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.open", forbidden)
    monkeypatch.setattr("gtpo_megatron.weights.hf.reader._weight_map", lambda _: {"matrix": "part0.safetensors"})
    with pytest.raises(ConfigError, match=r"part0\.safetensors: cannot be read: Permission denied"):
        WeightFolder(tmp_path)


def test_missing_misshapen_and_unfilled_parameters_are_named(tmp_path):
    save_file({"matrix": torch.randn(5, 3)}, tmp_path / "model.safetensors")
    parameters = {"m": torch.zeros(5, 3), "v": torch.zeros(7)}
    with pytest.raises(WeightMappingError, match="lacks 1 of 2 tensors, first 'vector'"):
        read_parameters(tmp_path, SHAPES, IDENTITY, parameters)
    save_file({"matrix": torch.randn(5, 4), "vector": torch.randn(7)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightMappingError, match=r"matrix has shape \(5, 4\), expected \(5, 3\)"):
        read_parameters(tmp_path, SHAPES, IDENTITY, parameters)
    with pytest.raises(WeightMappingError, match="no name table entry fills 'extra'"):
        read_parameters(tmp_path, SHAPES, IDENTITY, parameters | {"extra": torch.zeros(1)})


def test_what_is_replaced_stays_until_the_new_is_whole(tmp_path):
    target = tmp_path / "hf"
    target.mkdir()
    (target / "good.txt").write_text("x", encoding="utf-8")
    with pytest.raises(CheckpointError, match="No space left"), written_aside(target, num_bytes=1, replace=True):
        raise OSError(28, "No space left on device")
    assert (target / "good.txt").exists()
    with written_aside(target, num_bytes=1, replace=True) as scratch:
        (scratch / "new.txt").write_text("y", encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert [path.name for path in target.iterdir()] == ["new.txt"]


def test_the_folder_that_one_stands_in_has_a_name_too(tmp_path, monkeypatch):
    target = tmp_path / "model"
    target.mkdir()
    monkeypatch.chdir(target)
    with written_aside(Path(), num_bytes=1) as scratch:
        (scratch / "new").touch()
    assert (target / "new").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_rank_refuses_a_value_that_is_no_number_wherever_it_reads_it(tmp_path, dtype, value):
    tensors = {"matrix": torch.full((5, 3), 6e4, dtype=dtype), "vector": torch.full((7,), -6e4, dtype=dtype)}
    parameters = {"m": torch.zeros(5, 3), "v": torch.zeros(7)}
    save_file(tensors, tmp_path / "model.safetensors")
    read_parameters(tmp_path, SHAPES, IDENTITY, parameters)
    tensors["vector"][6] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model.safetensors: vector holds NaN or infinity \(1 of 7 values"):
        read_parameters(tmp_path, SHAPES, IDENTITY, parameters)


def test_large_numbers_whose_sum_is_infinite_are_finite():
    assert is_finite(torch.full((3,), 3e38))
    assert is_finite(torch.empty(0))
    assert not is_finite(torch.tensor([torch.inf, -torch.inf, 3e38]))


def test_all_chat_templates_go_along_and_neither_adapters_nor_other_folders_do(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    for name in (
        "adapter_config.json",
        "adapter_model.safetensors",
        "additional_chat_templates/tool_use.jinja",
        "checkpoint-1/optimizer.pt",
        "config.json",
        "model.safetensors",
    ):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("{}", encoding="utf-8")
    target.mkdir()
    copy_companions(source, target, dtype_name=None)
    found = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    assert found == ["additional_chat_templates/tool_use.jinja", "config.json"]
