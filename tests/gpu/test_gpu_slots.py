"""Buckets of weights in the memory of one GPU that a rank and a worker share."""

import pytest
import torch
from torch import multiprocessing

from gtpo_megatron.weights.push.link import SlotShape
from gtpo_megatron.weights.push.transports.gpu_slots import open_gpu_slots, share_gpu_slots
from gtpo_megatron.weights.push.transports.shared_memory import SlotFile, create_slots, remove_name

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SHAPE = SlotShape(slot_bytes=1 << 20, num_ranks=1, deadline_s=30.0, on_gpu=True)


def read_slots(slots, ready, answers):
    ready.wait(60)
    # numbers: a tensor in a queue is gone with its process
    answers.put(open_gpu_slots(SlotFile(slots))[:, ::4096].tolist())


def test_another_process_reads_what_was_written():
    slots = create_slots(SHAPE)
    context = multiprocessing.get_context("spawn")
    ready, answers = context.Event(), context.Queue()
    reader = context.Process(target=read_slots, args=(slots, ready, answers))
    reader.start()
    try:
        memory = share_gpu_slots(SlotFile(slots))
        memory.copy_(torch.arange(memory.numel(), device="cuda").view_as(memory) // 4096 % 251)
        torch.cuda.synchronize()
        ready.set()
        assert answers.get(timeout=60) == memory[:, ::4096].tolist()
    finally:
        reader.join(30)
        remove_name(slots)
    assert reader.exitcode == 0
