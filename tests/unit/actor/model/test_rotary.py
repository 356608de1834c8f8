"""Packed tokens turned at once are turned as sequence by sequence, to the last bit."""

from types import SimpleNamespace

import pytest
import torch

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of every optional kernel it lacks
]

LENGTHS = [8, 4, 12, 4]
BOUNDS = [0, 8, 12, 24, 28]
STARTS = [0] * 4


def angles_to(positions):
    """Of a head of 6 elements, as Megatron makes them: ``[positions, 1, 1, 6]``."""
    return (torch.arange(positions, dtype=torch.float32)[:, None] * torch.rand(3)).repeat(1, 2)[:, None, None]


def test_every_sequence_begins_at_position_0():
    from gtpo_megatron.actor.model.rotary import packed_angles

    angles = angles_to(20)
    packed = packed_angles(angles, BOUNDS, STARTS)
    assert packed.shape == (28, 1, 1, 6)
    for start, length in zip(BOUNDS, LENGTHS, strict=False):
        assert torch.equal(packed[start : start + length], angles[:length])


def test_a_sequence_begins_behind_what_it_shares():
    from gtpo_megatron.actor.model.rotary import packed_angles

    angles = angles_to(20)
    packed = packed_angles(angles, [0, 5, 8, 8], [0, 4, 3])
    assert torch.equal(packed, torch.cat([angles[:5], angles[4:7]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "index"), [(1, 0), (2, 0), (2, 1)])
def test_megatron_turns_packed_tokens_as_one_sequence_after_the_other(dtype, size, index):
    """Each context-parallel rank has an early and a late part of every sequence."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd

    from gtpo_megatron.actor.model.rotary import packed_angles

    torch.manual_seed(0)
    group = SimpleNamespace(size=lambda: size, rank=lambda: index)
    heads = torch.randn(BOUNDS[-1] // size, 2, 6).to(dtype)
    bounds, angles = torch.tensor(BOUNDS, dtype=torch.int32), angles_to(12)
    apart = _apply_rotary_pos_emb_thd(heads, bounds, angles, cp_group=group)
    at_once = _apply_rotary_pos_emb_thd(heads, bounds, packed_angles(angles, BOUNDS, STARTS), cp_group=group)
    assert torch.equal(at_once, apart)
    alone = _apply_rotary_pos_emb_thd(heads[: 8 // size], bounds[:2], angles[:9], cp_group=group)
    assert torch.equal(at_once[: 8 // size], alone)
