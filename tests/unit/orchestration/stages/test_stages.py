"""The turns of engines and trainer on shared GPUs."""

from gtpo_megatron.observability.timers import StageTimers
from gtpo_megatron.orchestration.stages.stages import MemorySharing


class Recorder:
    """Plays engine and actor, and writes down what they are told."""

    def __init__(self):
        self.told = []

    def run_on_all(self, stage, function):
        return [function(self)]

    def __getattr__(self, name):
        return lambda *arguments, **options: self.told.append((name, *arguments, *options.values()))


def test_a_step_s_turns():
    recorder = Recorder()
    timers = StageTimers()
    turns = MemorySharing(recorder, recorder, is_colocated=True, timers=timers)
    turns.to_trainer()
    assert recorder.told == [("sleep", False), ("onload",)]
    recorder.told.clear()
    turns.to_push()  # the engine's weights have the room that gradients and optimizer leave
    assert recorder.told == [("offload",), ("wake", "weights")]
    recorder.told.clear()
    turns.to_engine()
    assert recorder.told == [("wake", "kv_cache")]
    assert set(timers.take()) == {"timing/to_trainer_s", "timing/to_push_s", "timing/to_engine_s"}


def test_engines_with_gpus_of_their_own_move_nothing():
    recorder, timers = Recorder(), StageTimers()
    turns = MemorySharing(recorder, recorder, is_colocated=False, timers=timers)
    turns.to_trainer()
    turns.to_push()
    turns.to_engine()
    assert recorder.told == []
    assert timers.take() == {}
