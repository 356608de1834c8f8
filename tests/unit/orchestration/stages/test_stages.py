"""The turns of engines and trainer on shared GPUs."""

from gtpo_megatron.orchestration.stages.stages import MemorySharing


class Recorder:
    """Plays engine and actor, and writes down what they are told."""

    def __init__(self):
        self.told = []

    def __getattr__(self, name):
        return lambda *arguments, **options: self.told.append((name, *arguments, *options.values()))


def test_a_step_s_turns():
    recorder = Recorder()
    turns = MemorySharing(recorder, recorder, is_colocated=True)
    turns.to_trainer()
    assert recorder.told == [("sleep", False), ("onload",)]
    recorder.told.clear()
    turns.to_push()  # the engine's weights have the room that gradients and optimizer leave
    assert recorder.told == [("offload",), ("wake", "weights")]
    recorder.told.clear()
    turns.to_engine()
    assert recorder.told == [("wake", "kv_cache")]
