"""The order of a step's stages, and what stops it before anything learned is used."""

import dataclasses

import pytest

from gtpo_megatron.batch import PromptBatch
from gtpo_megatron.data.sharding import mini_batch_groups
from gtpo_megatron.errors import WeightSyncError
from gtpo_megatron.observability.metrics import Max
from gtpo_megatron.observability.timers import StageTimers
from gtpo_megatron.orchestration.loop.pipeline import rollout_pipeline
from gtpo_megatron.orchestration.loop.training_step import training_step
from gtpo_megatron.orchestration.stages.stages import MemorySharing, Stages
from gtpo_megatron.weights.push.sync import WeightSync
from recipes import tiny_cpu
from tests.unit.orchestration.gaps import check_of, gaps
from tests.unit.orchestration.loop.test_controller import PROBLEMS, World


class Written(World):
    """Writes down what it is asked; the gap is what the test says."""

    def __init__(self, gap):
        super().__init__()
        self.gap = gaps(gap)
        self.calls = []
        self.updates = None

    def score_tokens(self, rollouts, *, updates=()):
        self.calls.append("score")
        self.updates = updates
        return self.gap

    def use_sampler_scores(self, rollouts, *, updates=()):
        self.calls.append("adopt")
        self.updates = updates
        return {}

    def credit_tokens(self, rewards):
        self.calls.append("credit")
        return super().credit_tokens(rewards)

    def update(self, *, step):
        self.calls.append("update")
        return self.gap if "adopt" in self.calls else {}

    def transfer(self, version, *, with_checksums):
        self.calls.append("push")
        return super().transfer(version, with_checksums=with_checksums)


def one_step(source, gap=0.0, version=0, *, world=None, **update):
    world = world or Written(gap)
    world.version = version
    config = tiny_cpu.gtpo()
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, prompts_per_step=2),
        update=dataclasses.replace(config.update, **update),
        rollout=dataclasses.replace(config.rollout, group_size=2, entropy_source=source),
    )
    stages = Stages(
        engine=world,
        grade=world.grade,
        trainer=world,
        weight_sync=WeightSync(config.weight_sync, world.transfer),
        memory_sharing=MemorySharing(None, None, is_colocated=False, timers=StageTimers()),
        timers=StageTimers(),
        open_link=lambda _: None,
    )

    def draw(num):
        return PromptBatch(problems=tuple(PROBLEMS[:num]), group_ids=tuple(range(num)))

    try:
        return training_step(
            rollout_pipeline(draw, stages, config), stages, config, check_of(config), step=1
        ), world.calls
    except WeightSyncError as error:
        return error, world.calls


@pytest.mark.parametrize(("source", "scoring"), [("actor", "score"), ("rollout", "adopt")])
def test_the_entropies_come_from_where_the_configuration_says(source, scoring):
    report, calls = one_step(source, gap=1e-6)
    assert calls == [scoring, "credit", "update", "push"]
    assert report.metrics["sync/logprob_gap_max"].value == pytest.approx(1e-6, rel=0.1)
    assert report.metrics["sync/logprob_gap_scaled_limit"] == Max(5e-5)


@pytest.mark.parametrize(("source", "num_updates", "size"), [("actor", 2, 1), ("rollout", 1, 0)])
def test_the_ranks_get_rows_by_the_updates_that_they_will_make(source, num_updates, size):
    world = Written(0.0)
    one_step(source, world=world, updates_per_rollout=num_updates, mini_batch_prompts=size)
    drawn = mini_batch_groups(
        (0, 1), mini_batch_prompts=size, num_updates=num_updates, seed=tiny_cpu.gtpo().seed, step=1
    )
    assert world.updates == drawn
    assert len(drawn) == num_updates


def test_a_gap_stops_the_step_before_its_update():
    error, calls = one_step("actor", gap=0.1)
    assert "sync/logprob_gap_scaled 0.15 (limit 5e-05)" in str(error)
    assert calls == ["score"]


def test_without_a_scoring_pass_a_gap_stops_the_step_before_its_push():
    error, calls = one_step("rollout", gap=float("nan"))
    assert "sync/logprob_gap_scaled nan (limit 5e-05)" in str(error)
    assert calls == ["adopt", "credit", "update"]


@pytest.mark.parametrize("source", ["actor", "rollout"])
def test_responses_of_other_weights_are_refused_before_anything(source):
    error, calls = one_step(source, version=3)
    assert "come from policy version 3, the trainer has version 0" in str(error)
    assert calls == []
