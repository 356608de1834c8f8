"""The typed mappings: a rank's boxes of the whole parameter are what its copies say they are."""

import pytest
import torch

from gtpo_megatron.errors import WeightMappingError
from gtpo_megatron.weights.param_mapping import (
    QKV,
    Box,
    GatedMLP,
    HeadParts,
    Replicated,
    RowParallel,
    SliceCopy,
    TensorParallel,
    Vocabulary,
    clip,
    is_replicated,
)

WHOLE = TensorParallel(1, 0)
MAPPINGS = [
    Replicated("m", "norm", 12),
    RowParallel("m", "down", 6, 8),
    Vocabulary("m", "embedding", 13, 3, 16),
    GatedMLP("m", "gate", "up", 8, 3),
    QKV("m", "q", "k", "v", 8, 4, 3, 5),
    QKV("m", "q", "k", "v", 4, 4, 2, 1),
    HeadParts("m", (("qkv", 0, 3), ("qkv", 12, 3), ("qkv", 24, 4), ("z", 0, 4)), 4, 5),
    HeadParts("m", (("b", 0, 2), ("a", 0, 2)), 4, 5, is_split=False),
]


def parameter(mapping, tp):
    """A rank's parameter, every element the number of its place in the Hugging Face tensors; 0 where it only pads."""
    copies = list(mapping.copies(tp))
    rows = mapping.extent[0] // (1 if is_replicated(mapping) or isinstance(mapping, RowParallel) else tp.size)
    columns = mapping.extent[1] // (tp.size if isinstance(mapping, RowParallel) else 1)
    out = torch.zeros(rows, columns, dtype=torch.int64)
    for copy in copies:
        box = copy.hf_box
        name = sum(ord(letter) for letter in copy.hf_name) * 10**6
        places = torch.arange(box.row, box.row + box.num_rows)[:, None] * 1000
        places = places + torch.arange(box.column, box.column + box.num_columns)
        out[copy.megatron_box.slices] = name + places
    return out


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_held_boxes_are_the_ranks_rows_of_the_whole_parameter(mapping, size):
    whole = parameter(mapping, WHOLE)
    assert tuple(whole.shape) == mapping.extent
    times = torch.zeros_like(whole)
    for index in range(size):
        tp = TensorParallel(size, index)
        held = mapping.held(tp)
        assert torch.equal(torch.cat([whole[box.slices] for box in held]), parameter(mapping, tp))
        for box in held:
            times[box.slices] += 1
    assert (times == (size if is_replicated(mapping) else 1)).all()


def test_a_clipped_copy_counts_from_the_boxs_corner():
    copy = SliceCopy("m", Box(4, 6, 2, 8), "t", Box(100, 6, 20, 8))
    assert clip(copy, Box(6, 2, 0, 5)) == SliceCopy("m", Box(0, 2, 2, 3), "t", Box(102, 2, 20, 3))
    assert clip(copy, Box(0, 100, 0, 100)) == copy
    assert clip(copy, Box(10, 5, 2, 8)) is None  # touches it only
    assert clip(copy, Box(4, 6, 10, 1)) is None


def test_heads_that_do_not_split_are_named():
    with pytest.raises(WeightMappingError, match="does not split over tensor_parallel_size=5"):
        QKV("m", "q", "k", "v", 4, 4, 2, 1).held(TensorParallel(5, 0))
