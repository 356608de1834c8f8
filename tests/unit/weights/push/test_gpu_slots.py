"""Memory that a rank shares by CUDA IPC is no expandable segment's; the allocator's settings are those of torch."""

import pytest
import torch

from gtpo_megatron.weights.push.link import SlotShape
from gtpo_megatron.weights.push.transports import gpu_slots

SETTINGS = "expandable_segments:True"


class File:
    """A worker's file without a file."""

    shape = SlotShape(slot_bytes=24, num_ranks=1, deadline_s=1.0, on_gpu=True)

    def publish(self, handle):
        self.handle = handle


@pytest.fixture
def settings():
    """As the ranks on GPUs have them."""
    before = torch._C._accelerator_getAllocatorSettings()
    torch._C._accelerator_setAllocatorSettings(SETTINGS)
    yield torch._C._accelerator_getAllocatorSettings
    torch._C._accelerator_setAllocatorSettings(before)


def test_slots_are_made_without_expandable_segments(settings, monkeypatch):
    seen, empty = [], torch.empty

    def made(*size, dtype, device):
        seen.append((settings(), device))
        return empty(*size, dtype=dtype)

    monkeypatch.setattr(gpu_slots, "_SLOTS", {})
    monkeypatch.setattr(gpu_slots.torch, "empty", made)
    monkeypatch.setattr(gpu_slots, "reduce_tensor", lambda tensor: ("handle", tuple(tensor.shape)))
    gpu_slots.share_gpu_slots(File())
    assert seen == [("expandable_segments:False", "cuda")]
    assert settings() == SETTINGS


def test_the_settings_come_back_after_a_failure(settings, monkeypatch):
    def none_left(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(gpu_slots, "_SLOTS", {})
    monkeypatch.setattr(gpu_slots.torch, "empty", none_left)
    with pytest.raises(torch.OutOfMemoryError):
        gpu_slots.share_gpu_slots(File())
    assert settings() == SETTINGS
