"""Trainer and engines take turns as in a step: no engine answers without a push since it slept."""

from types import SimpleNamespace

import pytest

from gtpo_megatron.companions.preflight.gpu_handover import GpuHandover
from gtpo_megatron.companions.preflight.memory_watch import MemoryWatch


@pytest.fixture
def made():
    calls, memory = [], MemoryWatch()
    memory.watch_devices(lambda phase: calls.append(f"phase {phase}") if phase else None)
    sharing = SimpleNamespace(
        to_trainer=lambda *, keep_weights: calls.append(f"to_trainer {keep_weights}"),
        to_push=lambda: calls.append("to_push"),
        to_engine=lambda: calls.append("to_engine"),
    )
    sync = SimpleNamespace(push=lambda *, version: calls.append(f"push {version}"))
    return GpuHandover(SimpleNamespace(memory_sharing=sharing, weight_sync=sync), memory), calls


PUSH = ["to_push", "phase push", "push {}", "to_engine"]


def pushed(version):
    return [call.format(version) for call in PUSH]


def test_the_first_turn_is_the_trainers(made):
    gpus, calls = made
    gpus.to_engine()
    assert calls == ["to_trainer False", *pushed(0)]
    assert gpus.seconds.keys() == {"to_trainer", "to_push", "push", "to_engine"}


def test_a_turn_that_one_has_is_not_taken_again(made):
    gpus, calls = made
    gpus.to_engine()
    del calls[:]
    gpus.to_engine()
    assert calls == []
    gpus.to_trainer(keep_weights=True)
    gpus.to_trainer()
    assert calls == ["to_trainer True"]


def test_engines_get_the_newest_weights(made):
    gpus, calls = made
    gpus.to_engine()
    gpus.to_trainer()
    gpus.count_update()
    gpus.count_update()
    del calls[:]
    gpus.to_engine()
    assert calls == pushed(2)
