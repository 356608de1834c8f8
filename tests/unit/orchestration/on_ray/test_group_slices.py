"""A slice on an engine that was replaced between two slices: what it held is reported as lost."""

from types import SimpleNamespace

from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.orchestration.on_ray.engines import RayGroupSampler
from gtpo_megatron.orchestration.stages.engines import SliceEnd


class Engine:
    """Counts the slices that it is asked for."""

    def __init__(self):
        self.slices = 0
        self.sample = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.begin))

    def begin(self, *_):
        self.slices += 1


class Fleet:
    """Two engines, of which some have no weights yet."""

    def __init__(self):
        self.found = [Engine(), Engine()]
        self.without_weights = set()

    def processes(self, engines):
        return {engine: self.found[engine] for engine in engines}

    def is_without_weights(self, engine):
        return engine in self.without_weights


def sampler(fleet):
    return RayGroupSampler(fleet, SamplingConfig(), samples_per_prompt=2, seed=0)


LOST = [SliceEnd(engine=1, groups={}, is_lost=True)]


def test_an_engine_that_was_replaced_and_has_weights_lost_its_groups():
    fleet = Fleet()
    found = sampler(fleet)
    found.begin_slice(1, {}, [])
    fleet.found[1] = replacement = Engine()  # by a push that found it dead
    found.begin_slice(1, {}, [])
    assert found.ended_slices() == LOST
    assert replacement.slices == 0
    found.begin_slice(1, {}, [])
    assert replacement.slices == 1, "once reported, it gets work again"


def test_an_engine_without_weights_gets_no_work():
    fleet = Fleet()
    found = sampler(fleet)
    fleet.without_weights = {1}
    found.begin_slice(1, {}, [])
    assert found.ended_slices() == LOST
    fleet.without_weights = set()
    found.begin_slice(1, {}, [])
    assert fleet.found[1].slices == 1
