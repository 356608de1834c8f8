"""Quantized folders are read as what transformers makes of them, bit for bit, whole and in pieces."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config, Mxfp4Config

from gtpo_megatron.errors import ConfigError, WeightMappingError
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.conversion import ConversionProgress, dequantize
from gtpo_megatron.weights.hf.reader import WeightFolder
from gtpo_megatron.weights.param_mapping import Box
from gtpo_megatron.weights.reshard import hf_shapes
from tests.unit.weights.quantized_folders import KINDS, fp8_blocks, make_folder

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' loading

BY_TRANSFORMERS = {
    "fp8": lambda: FineGrainedFP8Config(weight_block_size=(32, 32), dequantize=True),
    "mxfp4": lambda: Mxfp4Config(dequantize=True),
    "int4": lambda: CompressedTensorsConfig(dequantize=True),
    "fp8_rows": lambda: CompressedTensorsConfig(dequantize=True),
}


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    made = tmp_path_factory.mktemp(request.param)
    make_folder(made, request.param)
    return made, request.param


def read_whole(folder):
    shapes = hf_shapes(read_architecture(folder))
    with WeightFolder(folder) as weights:
        weights.check(shapes)
        return {name: weights.whole(name).reshape(shape) for name, shape in shapes.items()}


def by_transformers(folder, kind):
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=BY_TRANSFORMERS[kind](), dtype="bfloat16")
    found = dict(model.state_dict())
    for name in [name for name in found if ".experts." in name]:  # gpt-oss's, of all experts
        whole = found.pop(name)
        layer, _, part = name.rpartition(".")
        kind = "bias" if part.endswith("_bias") else "weight"
        parts = ("gate_proj", "up_proj") if part.startswith("gate_up") else ("down_proj",)
        for expert, one in enumerate(whole):
            for number, each in enumerate(parts):
                found[f"{layer}.{expert}.{each}.{kind}"] = one[..., number :: len(parts)].t()
    return found


def test_every_tensor_has_transformers_bits(folder):
    path, kind = folder
    found, wanted = read_whole(path), by_transformers(path, kind)
    assert found.keys() <= wanted.keys(), "compressed-tensors leaves its scales there"
    for name, tensor in found.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, wanted[name]), name


def test_a_box_is_that_of_the_whole(folder):
    """Boxes that begin and end within blocks, groups, words and bytes."""
    path, _ = folder
    whole = read_whole(path)
    draw = torch.Generator().manual_seed(0)
    with WeightFolder(path) as weights:
        for name, tensor in whole.items():
            if tensor.ndim != 2:
                continue
            for _ in range(6):
                (row, num_rows), (column, num_columns) = (span(size, draw) for size in tensor.shape)
                piece = weights.read(name, Box(row, num_rows, column, num_columns))
                assert torch.equal(piece, tensor[row : row + num_rows, column : column + num_columns]), name


def span(size, draw):
    first, last = sorted(torch.randint(0, size + 1, (2,), generator=draw).tolist())
    return (first, last - first) if last > first else (0, size)


def test_blocks_that_are_cut_at_the_edges(tmp_path):
    """As DeepSeek's ``kv_a_proj_with_mqa`` of 576 rows, where transformers gives up; against a scalar loop."""
    make_folder(tmp_path, "fp8")
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    name = "model.layers.0.mlp.gate_proj.weight"
    stored |= fp8_blocks(name, torch.randn(96, 64).bfloat16(), block=28)
    save_file(stored, path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [28, 28]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightMappingError, match=r"_scale_inv has shape .*, expected .* for model\.layers\.0"):
        WeightFolder(tmp_path)
    for other in [one for one in stored if one.endswith("_scale_inv") and name not in one]:
        weight = other.removesuffix("_scale_inv")
        stored |= fp8_blocks(weight, stored[weight].float(), block=28)
    save_file(stored, path)
    found = read_whole(tmp_path)[name]
    scales, quantized = stored[f"{name}_scale_inv"], stored[name].float()
    for row, column in ((0, 0), (27, 27), (28, 27), (95, 63), (84, 56), (83, 55)):
        wanted = (quantized[row, column] * scales[row // 28, column // 28]).bfloat16()
        assert found[row, column] == wanted


def test_a_folder_of_bfloat16_is_made_of_it(folder, tmp_path):
    path, kind = folder
    dequantize(path, tmp_path / "out", progress=ConversionProgress())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    whole = read_whole(path)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in read_whole(tmp_path / "out").items())
    if kind == "fp8_rows":  # compressed-tensors rounds activations too
        return
    ids = torch.arange(1, 12)[None]
    logits = [
        AutoModelForCausalLM.from_pretrained(where, dtype="bfloat16", **more)(ids).logits
        for where, more in ((tmp_path / "out", {}), (path, {"quantization_config": BY_TRANSFORMERS[kind]()}))
    ]
    assert torch.equal(*logits)


def test_what_is_not_quantized_needs_no_conversion(tmp_path):
    make_folder(tmp_path / "model", "fp8")
    dequantize(tmp_path / "model", tmp_path / "out", progress=ConversionProgress())
    with pytest.raises(ConfigError, match="its weights are not quantized"):
        dequantize(tmp_path / "out", tmp_path / "again", progress=ConversionProgress())


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantized by 'gptq' are not read: GPTQ's numbers were moved"),
        ({"quant_method": "awq"}, "quantized by 'awq' are not read: AWQ has scaled channels"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes quantizes a folder of 16 bits while"),
        ({"quant_method": "hqq"}, r"quantized by 'hqq' are not read: read are FP8 \('fp8'\), MXFP4"),
        ({}, ""),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size=\[128\]: expected two sizes"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int", "symmetric": False}}},
            },
            "in the format 'pack-quantized' with int of 4 bits is not read",
        ),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "with no groups is not read"),
    ],
)
def test_other_kinds_are_refused_each_with_its_own_way(tmp_path, given, why):
    make_folder(tmp_path, "fp8")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": given}))
    if not given:
        assert not read_architecture(tmp_path).is_quantized
        with pytest.raises(WeightMappingError, match=r"is F8_E4M3; .*or a quantization_config in config\.json"):
            WeightFolder(tmp_path)
        return
    with pytest.raises(ConfigError, match=why):
        read_architecture(tmp_path)


DAMAGES = {
    "fp8": (("_scale_inv", None), r"is FP8 and has no scale: neither .*_scale_inv nor"),
    "fp8_rows": (("_scale", torch.ones(3, 1)), r"has shape \(3, 1\), expected \(\d+, 1\)"),
    "int4": (("_scale", torch.ones(3, 2)), r"_scale \(3, 2\) does not fit"),
    "mxfp4": (("_scales", None), "_scales has shape none, expected"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_is_missing_or_of_another_shape_is_named(tmp_path, kind):
    make_folder(tmp_path, kind)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    (suffix, other), why = DAMAGES[kind]
    name = next(name for name in stored if name.endswith(suffix))
    del stored[name]
    if other is not None:
        stored[name] = other
    save_file(stored, path)
    with pytest.raises(WeightMappingError, match=why) as found:
        WeightFolder(tmp_path)
    assert re.search(r"layers\.\d", str(found.value))
