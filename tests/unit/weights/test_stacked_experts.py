"""Folders that have all experts of a layer in one tensor: what is none is refused; bytes are test_conversion.py's."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gtpo_megatron.errors import WeightMappingError
from gtpo_megatron.weights.hf.reader import WeightFolder
from gtpo_megatron.weights.hf.stacked_experts import parts_inside

LAYER = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    "shape", [(), (4,), (4, 6), (4, 6, 8, 1), (0, 6, 8), (4, 0, 8), (4, 6, 0), (1 << 40, 0, 4), (1 << 20, 6, 8)]
)
@pytest.mark.parametrize("is_turned", [False, True])
def test_a_tensor_that_is_not_of_all_experts_is_refused(shape, is_turned):
    with pytest.raises(WeightMappingError, match="which is not that of all experts of a layer"):
        parts_inside(f"{LAYER}.down_proj", shape, where=Path("file"), is_turned=is_turned)


def test_gate_and_up_are_as_wide():
    with pytest.raises(WeightMappingError, match=r"gate_up_proj has shape \(4, 7, 8\)"):
        parts_inside(f"{LAYER}.gate_up_proj", (4, 7, 8), where=Path("file"), is_turned=False)


def test_an_expert_that_is_there_twice_is_refused(tmp_path):
    tensors = {f"{LAYER}.down_proj": torch.zeros(2, 4, 6), f"{LAYER}.1.down_proj.weight": torch.ones(4, 6)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightMappingError, match=rf"has {LAYER}.1.down_proj.weight, which is there by itself, too"):
        WeightFolder(tmp_path)
