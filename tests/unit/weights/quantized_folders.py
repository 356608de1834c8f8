"""Folders of tiny models as the hub has quantized ones: FP8 in blocks, MXFP4, packed INT4, FP8 with a scale a row."""

import json
from dataclasses import replace

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import FP4_VALUES

from tests.distributed.family_models import FAMILIES, MIXTURES, make_family_model

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
BLOCK = 32
GROUP = 32

FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK] * 2}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}},
    "ignore": ["lm_head"],
}
FP8_ROWS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"},
        }
    },
    "ignore": ["lm_head"],
}


def make_folder(folder, kind, **changes):
    """A model of bfloat16, then quantized in place; returns what it was quantized from."""
    family = MIXTURES["gpt_oss"] if kind == "mxfp4" else FAMILIES["qwen3_untied"]
    make_family_model(folder, replace(family, changes={**family.changes, **SIZES, **changes}), dtype=torch.bfloat16)
    path = folder / "model.safetensors"
    before = load_file(path)
    after = {}
    for name, tensor in before.items():
        after |= _QUANTIZERS[kind](name, tensor)
    save_file({name: tensor.contiguous() for name, tensor in after.items()}, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": _CONFIGS[kind]}))
    return before


def is_projection(name):
    return name.endswith("_proj.weight")


def fp8_blocks(name, tensor, *, block=BLOCK):
    if not is_projection(name):
        return {name: tensor}
    rows, columns = (-(-size // block) for size in tensor.shape)
    scales = torch.empty(rows, columns)
    quantized = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            where = slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block)
            scales[row, column] = tensor[where].float().abs().max() / 448
            quantized[where] = (tensor[where].float() / scales[row, column]).to(torch.float8_e4m3fn)
    return {name: quantized, f"{name}_scale_inv": scales}


def fp8_rows(name, tensor):
    if not is_projection(name):
        return {name: tensor}
    scales = (tensor.float().abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    return {name: (tensor.float() / scales.float()).to(torch.float8_e4m3fn), f"{name}_scale": scales}


def int4(name, tensor):
    if not is_projection(name):
        return {name: tensor}
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32  # which takes seconds

    groups = tensor.float().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 7.5).to(torch.bfloat16)
    whole = (groups / scales.float()[..., None]).round().clamp(-8, 7).to(torch.int8).flatten(1)
    return {
        f"{name}_packed": pack_to_int32(whole, 4),
        f"{name}_scale": scales,
        f"{name}_shape": torch.tensor(tensor.shape),
    }


def mxfp4(name, tensor):
    if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        return {name: tensor}
    turned = tensor.float().mT.unflatten(-1, (-1, 32))  # [experts, rows, groups, 32]
    exponents = (turned.abs().amax(-1) / 6).log2().ceil().to(torch.int32)
    scaled = turned / torch.exp2(exponents.float())[..., None]
    table = torch.tensor(FP4_VALUES)
    nearest = (scaled[..., None] - table).abs().argmin(-1).to(torch.uint8)
    return {
        f"{name}_blocks": nearest[..., 0::2] | (nearest[..., 1::2] << 4),
        f"{name}_scales": (exponents + 127).to(torch.uint8),
    }


_QUANTIZERS = {"fp8": fp8_blocks, "fp8_rows": fp8_rows, "int4": int4, "mxfp4": mxfp4}
_CONFIGS = {"fp8": FP8_BLOCKS, "fp8_rows": FP8_ROWS, "int4": INT4, "mxfp4": MXFP4}
KINDS = tuple(_CONFIGS)
