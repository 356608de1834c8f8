"""What a link that could not be opened leaves behind, and what the end of another run leaves of one."""

import dataclasses
import os
from pathlib import Path

import pytest

from gtpo_megatron.config.algorithm.base import OffPolicyConfig
from gtpo_megatron.distributed.groups import RankCoordinates
from gtpo_megatron.errors import EngineLostError
from gtpo_megatron.orchestration.stages.trainer import Trainer
from gtpo_megatron.orchestration.stages.weight_link import connect
from gtpo_megatron.supervision.process_tree import mapped_shared, remove_unused_shared
from gtpo_megatron.weights.push.link import SlotShape
from gtpo_megatron.weights.push.transports import shared_memory as module
from gtpo_megatron.weights.push.transports.process_group import open_store
from gtpo_megatron.weights.push.transports.shared_memory import create_slots, remove_name
from recipes import tiny_cpu


class Rank:
    """A rank on this machine."""

    def open_weight_store(self, deadline_s):
        self.store = open_store("127.0.0.1", deadline_s=deadline_s)
        return "127.0.0.1", self.store.port

    def connect_weights(self, link):
        raise AssertionError("the sampler comes first")


class Ranks:
    """Two ranks on this machine."""

    hosts = ("h", "h")
    coordinates = tuple(
        RankCoordinates(global_rank=r, tensor_index=r, pipeline_index=0, context_index=0, data_index=0, pipeline_size=1)
        for r in range(2)
    )

    def __init__(self):
        self.each = (Rank(), Rank())

    def run_on_each(self, stage, functions):
        return [function(rank) for function, rank in zip(functions, self.each, strict=False)]


class DyingSampler:
    """Its engine has made its slots, and dies before it maps them: it removes no name any more."""

    hosts = ("h",)

    def open_slots(self, shape):
        self.slots = create_slots(dataclasses.replace(shape, slot_bytes=1 << 12))
        assert Path(self.slots.path).exists()
        return {0: self.slots}

    def connect_weights(self, link):
        self.link = link
        raise EngineLostError("rollout engine died")

    def remove_slot_names(self):
        raise EngineLostError("and answers no more")


@pytest.mark.parametrize(("transport", "placement"), [("shared_memory", "disaggregated"), ("relay", "colocated")])
def test_slots_of_an_engine_that_dies_meanwhile_do_not_stay_in_memory(transport, placement):
    config = tiny_cpu.gtpo()
    config = dataclasses.replace(
        config,
        weight_sync=dataclasses.replace(config.weight_sync, transport=transport),
        rollout=dataclasses.replace(config.rollout, placement=placement),
    )
    sampler = DyingSampler()
    with pytest.raises(EngineLostError, match="answers no more"):
        connect(config, Trainer(Ranks()), sampler, has_gpus=False)
    assert not Path(sampler.slots.path).exists()


@pytest.mark.parametrize(
    ("dtype", "on_the_way"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("fp8", "bfloat16")]
)
def test_an_engine_in_fp8_gets_bfloat16_and_all_its_workers_the_same_layers_first(dtype, on_the_way):
    config = tiny_cpu.gtpo()
    config = dataclasses.replace(
        config,
        rollout=dataclasses.replace(config.rollout, dtype=dtype, entropy_source="actor"),
        algorithm=dataclasses.replace(config.algorithm, off_policy=OffPolicyConfig(mode="truncate")),
    )
    sampler = DyingSampler()
    with pytest.raises(EngineLostError):
        connect(config, Trainer(Ranks()), sampler, has_gpus=False)
    assert sampler.link.dtype_name == on_the_way
    assert sampler.link.layout.in_step == (dtype == "fp8")


def test_the_end_of_another_run_leaves_slots_that_nobody_else_has_mapped_yet(shared_memory, monkeypatch):
    monkeypatch.setattr(module, "SHARED_MEMORY", shared_memory)
    slots = create_slots(SlotShape(slot_bytes=1 << 12, num_ranks=1, deadline_s=1.0))
    path = Path(slots.path)
    inode = path.stat().st_ino
    remove_unused_shared(())
    assert path.exists()
    remove_unused_shared((), of={os.getpid()})  # as after the death of this process, which has made them
    assert not path.exists()
    remove_name(slots)
    assert inode not in mapped_shared(os.getpid()), "its memory would never be freed"
