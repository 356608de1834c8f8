"""The shared buffer, its checksums, and Hugging Face folders in and out."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gtpo_megatron.errors import CheckpointError, ConfigError, WeightMappingError, WeightSyncError
from gtpo_megatron.weights import hf_writer
from gtpo_megatron.weights.checksum import slice_checksum, tensor_checksum
from gtpo_megatron.weights.hf_buffer import BufferLayout, HFBuffer, allocate, new_layout, remove_name
from gtpo_megatron.weights.hf_reader import WeightFolder, read_parameters, weight_files
from gtpo_megatron.weights.hf_writer import write_folder
from gtpo_megatron.weights.param_mapping import Box, SliceCopy
from gtpo_megatron.weights.sync import compare_checksums

SHAPES = {"matrix": (5, 3), "vector": (7,)}


@pytest.fixture
def layout(tmp_path):
    return BufferLayout(path=str(tmp_path / "buffer"), dtype_name="float32", shapes=SHAPES)


def test_two_mappings_see_the_same_tensors(layout):
    writer, reader = HFBuffer(layout), HFBuffer(layout)
    remove_name(layout)  # a mapping outlives the file's name
    writer["matrix"].copy_(torch.arange(15.0).reshape(5, 3))
    writer["vector"].fill_(2.0)
    assert torch.equal(reader["matrix"], torch.arange(15.0).reshape(5, 3))
    assert [name for name, _ in reader.items()] == ["matrix", "vector"]
    assert reader["vector"].sum() == 14.0


def test_tensors_start_at_cache_lines(layout):
    offsets, num_bytes = layout.offsets()
    assert offsets == {"matrix": 0, "vector": 64}
    assert num_bytes == 128


def test_layouts_have_names_of_their_own():
    assert new_layout(SHAPES, "float32").path != new_layout(SHAPES, "float32").path


def test_an_unknown_tensor_is_named(layout):
    with pytest.raises(WeightMappingError, match="no tensor 'nose' in the buffer"):
        HFBuffer(layout)["nose"]


def test_a_folder_that_is_not_there_is_named():
    layout = BufferLayout(path="/nowhere/buffer", dtype_name="float32", shapes=SHAPES)
    with pytest.raises(WeightSyncError, match="cannot map .* MiB of shared memory at /nowhere/buffer"):
        HFBuffer(layout)


def test_memory_is_taken_at_once(layout):
    allocate(layout)
    stat = Path(layout.path).stat()
    assert stat.st_blocks * 512 >= stat.st_size == 128
    buffer = HFBuffer(layout)
    assert buffer["vector"].sum() == 0


def test_a_memory_file_system_that_is_too_small_is_named(layout, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(WeightSyncError, match="no room for .* MiB of weights .* --shm-size"):
        allocate(layout)
    assert not Path(layout.path).exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_checksum_shares_of_any_cut_add_up(dtype):
    tensor = torch.randn(37, 11, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = tensor_checksum(tensor)
    total = 0
    for rows in (slice(0, 5), slice(5, 36), slice(36, 37)):
        for columns in (slice(0, 4), slice(4, 11)):
            box = tensor[rows, columns]
            total += slice_checksum(box, row=rows.start, column=columns.start, num_columns=11)
    assert total % 2**64 == whole
    assert 0 <= whole < 2**64


def test_checksum_sees_one_bit_and_an_exchange():
    tensor = torch.arange(1.0, 13.0).reshape(4, 3)
    flipped = tensor.clone()
    flipped.view(torch.int32)[2, 1] ^= 1
    exchanged = tensor[[1, 0, 2, 3]]
    assert len({tensor_checksum(t) for t in (tensor, flipped, exchanged, tensor.flatten()[:11])}) == 4


def test_checksum_in_many_chunks_equals_the_formula(monkeypatch):
    monkeypatch.setattr("gtpo_megatron.weights.checksum._CHUNK_ROWS_ELEMENTS", 4)
    tensor = torch.randn(9, 3)
    bits = tensor.flatten().view(torch.int32).tolist()
    expected = sum(b * (2 * i + 1) * 0x9E3779B97F4A7C15 for i, b in enumerate(bits)) % 2**64
    assert tensor_checksum(tensor) == expected


def test_parameters_are_written_and_summed_by_the_plan(layout):
    buffer = HFBuffer(layout)
    parameters = {"shard": torch.randn(4, 3), "bias": torch.randn(7)}
    plan = [
        SliceCopy("shard", Box(0, 2, 0, 3), "matrix", Box(3, 2, 0, 3)),
        SliceCopy("shard", Box(2, 2, 1, 2), "matrix", Box(0, 2, 0, 2)),
        SliceCopy("bias", Box(0, 7, 0, 1), "vector", Box(0, 7, 0, 1)),
    ]
    buffer["matrix"].zero_()
    buffer.write(plan, parameters)
    assert torch.equal(buffer["matrix"][3:], parameters["shard"][:2])
    assert torch.equal(buffer["matrix"][:2, :2], parameters["shard"][2:, 1:])
    assert torch.equal(buffer["vector"], parameters["bias"])
    sums = buffer.checksums(plan, parameters)
    assert sums == {name: tensor_checksum(tensor) for name, tensor in buffer.items()}  # zeros add nothing


def test_rounding_to_the_buffers_dtype_is_part_of_the_checksum(tmp_path):
    layout = BufferLayout(path=str(tmp_path / "half"), dtype_name="bfloat16", shapes={"vector": (3,)})
    buffer, parameters = HFBuffer(layout), {"v": torch.tensor([1.001, 2.002, 3.003])}
    plan = [SliceCopy("v", Box(0, 3, 0, 1), "vector", Box(0, 3, 0, 1))]
    buffer.write(plan, parameters)
    assert buffer.checksums(plan, parameters) == {"vector": tensor_checksum(buffer["vector"])}


def test_unequal_checksums_name_version_worker_and_tensor():
    compare_checksums({"a": 1, "b": 2}, [{"a": 1, "b": 2}], version=3)
    with pytest.raises(WeightSyncError, match=r"version 3: worker 1 .* 1 of 2 tensors, first 'b'"):
        compare_checksums({"a": 1, "b": 2}, [{"a": 1, "b": 2}, {"a": 1, "b": 7}], version=3)
    with pytest.raises(WeightSyncError, match="first 'c'"):
        compare_checksums({"a": 1}, [{"a": 1, "c": 0}], version=3)


# ---------------------------------------------------------------------------------------------------- reading folders
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
    index = {"weight_map": {"matrix": "gone.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ConfigError, match="names gone.safetensors, not in the folder"):
        weight_files(tmp_path)


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


# ---------------------------------------------------------------------------------------------------- writing folders
@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16", "hidden_size": 3}), encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    (folder / "model.safetensors.index.json").write_text("{}", encoding="utf-8")
    (folder / "model-1.safetensors").write_bytes(b"old")
    return folder


@pytest.mark.parametrize("shard_bytes", [1 << 30, 61])
def test_an_exported_folder_is_whole(layout, source, tmp_path, monkeypatch, shard_bytes):
    monkeypatch.setattr(hf_writer, "SHARD_BYTES", shard_bytes)
    buffer = HFBuffer(layout)
    buffer["matrix"].normal_()
    buffer["vector"].normal_()
    target = tmp_path / "hf"
    target.mkdir()
    (target / "stale.txt").write_text("x", encoding="utf-8")
    write_folder(buffer, source, target)
    files = {path.name for path in target.iterdir()}
    assert "stale.txt" not in files
    assert "model-1.safetensors" not in files
    assert {"config.json", "tokenizer.json"} <= files
    assert json.loads((target / "config.json").read_text())["dtype"] == "float32"
    found = {name: tensor for path in weight_files(target) for name, tensor in load_file(path).items()}
    assert found.keys() == SHAPES.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in buffer.items())
    assert len(weight_files(target)) == (1 if shard_bytes > 61 else 2)


def test_a_disk_that_refuses_leaves_the_old_export(layout, source, tmp_path, monkeypatch):
    target = tmp_path / "hf"
    target.mkdir()
    (target / "good.txt").write_text("x", encoding="utf-8")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_writer, "save_file", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        write_folder(HFBuffer(layout), source, target)
    assert (target / "good.txt").exists()
