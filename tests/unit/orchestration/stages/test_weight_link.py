"""What a link that could not be opened leaves behind."""

import dataclasses
from pathlib import Path

import pytest

from gtpo_megatron.distributed.groups import RankCoordinates
from gtpo_megatron.errors import EngineLostError
from gtpo_megatron.orchestration.stages.weight_link import connect
from gtpo_megatron.weights.push.transports.process_group import open_store
from gtpo_megatron.weights.push.transports.shared_memory import create_slots
from recipes import tiny_cpu


class Trainer:
    """Two ranks on this machine."""

    def coordinates(self):
        return [
            (
                RankCoordinates(
                    global_rank=r, tensor_index=r, pipeline_index=0, context_index=0, data_index=0, pipeline_size=1
                ),
                "h",
            )
            for r in range(2)
        ]

    def padded_vocab_size(self):
        return 512

    def open_weight_store(self, deadline_s):
        self.store = open_store("127.0.0.1", deadline_s=deadline_s)
        return "127.0.0.1", self.store.port

    def connect_weights(self, link):
        raise AssertionError("the sampler comes first")


class DyingSampler:
    """Its engine has made its slots, and dies before it maps them: it removes no name any more."""

    hosts = ("h",)

    def open_slots(self, shape):
        self.slots = create_slots(dataclasses.replace(shape, slot_bytes=1 << 12))
        assert Path(self.slots.path).exists()
        return {0: self.slots}

    def connect_weights(self, link):
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
        connect(config, Trainer(), sampler, has_gpus=False)
    assert not Path(sampler.slots.path).exists()
