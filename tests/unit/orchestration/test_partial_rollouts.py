"""Responses that survive a push, over parts that do nothing: who waits for whom, what is counted, what is not lost."""

import dataclasses
import threading
import time

import pytest
import torch

from gtpo_megatron.errors import EngineLostError
from gtpo_megatron.observability.metrics import Max, to_scalars
from gtpo_megatron.run_folder.folder import RunFolder
from gtpo_megatron.run_folder.metrics_file import read_metrics
from tests.unit.orchestration.loop.test_controller import World, run
from tests.unit.orchestration.loop.test_pipeline import PATIENCE_S, groups, loop


class Mixing(World):
    """The first token of a response is of the weights when it was begun, the others of those when it was whole."""

    def __init__(self):
        super().__init__()
        self.log = []
        self.in_flight = set()
        self.changed = threading.Condition()
        self.while_sampling = lambda _: None
        self.is_lost = True
        self.gap = 0.0

    def generate(self, prompts, sampling, *, samples_per_prompt, seed):
        begun, step = self.version, prompts.group_ids[0] // 2 + 1
        self.note(f"sample {step} of version {begun}")
        self.in_flight.add(step)
        try:
            self.while_sampling(step)
        finally:
            self.in_flight.discard(step)
        rollouts = super().generate(prompts, sampling, samples_per_prompt=samples_per_prompt, seed=seed).payload
        versions = torch.full_like(rollouts.response_ids, self.version)
        versions[:, 0] = begun
        return self.hold(
            dataclasses.replace(
                rollouts, policy_version=begun, token_versions=versions if self.version != begun else None
            )
        )

    def note(self, line):
        with self.changed:
            self.log.append(line)
            self.changed.notify_all()

    def wait_for(self, line):
        with self.changed:
            assert self.changed.wait_for(lambda: line in self.log, PATIENCE_S), f"no {line!r} in {self.log}"

    def transfer(self, version, *, with_checksums):
        super().transfer(version, with_checksums=with_checksums)
        self.note(f"push {version}")
        return {}, {}

    def score_tokens(self, rollouts):
        return {"sync/logprob_gap_max": Max(self.gap), "sync/logprob_gap_mean": Max(self.gap)}

    def replace_lost(self):
        found, self.is_lost = self.is_lost, False
        return found

    def wait_for_the_next_push(self, step):
        """Sampling takes so long that the weights change meanwhile; but for the first step's."""
        if step > 1:
            self.wait_for(f"push {step - 1}")


def pushes(world):
    return [line for line in world.log if line.startswith("push")]


def samples(world):
    return [line for line in world.log if line.startswith("sample")]


def test_a_push_does_not_wait_and_what_is_in_flight_goes_on_with_the_new_weights():
    world = Mixing()
    world.while_sampling = world.wait_for_the_next_push
    _, step = loop(world, max_staleness=1, partial=True)
    first = step(1)
    assert to_scalars(first.metrics)["rollout/multi_version_count"] == 0
    world.gap = 5.0  # far above the limit: the sampler's log-probs are of other weights by right
    for number in (2, 3):
        report = step(number)
        assert groups(report) == [2 * number - 2, 2 * number - 1]
        rollouts = report.sampled.rollouts
        assert rollouts.policy_version == number - 2  # the oldest
        is_long = rollouts.response_lengths > 1  # one token is of one version
        assert torch.equal(rollouts.is_multi_version, is_long)
        scalars = to_scalars(report.metrics)
        assert scalars["rollout/staleness_count"] == 1
        assert scalars["rollout/multi_version_count"] == int(is_long.sum()) > 0
        assert "sync/logprob_gap_max" not in scalars


def test_the_step_after_next_is_begun_while_the_last_responses_of_the_next_are_written():
    """With the weights that the next step starts from, so that it is one push old when it is its turn."""
    world = Mixing()

    def while_sampling(step):
        if 1 < step < 5:
            world.wait_for(f"sample {step + 1} of version {step - 1}")

    world.while_sampling = while_sampling
    _, step = loop(world, max_staleness=1, partial=True)
    staleness = [to_scalars(step(number).metrics)["rollout/staleness_count"] for number in range(1, 6)]
    assert staleness == [0, 1, 1, 1, 1]
    assert sorted(samples(world)) == [
        *("sample 1 of version 0", "sample 2 of version 0"),
        *("sample 3 of version 1", "sample 4 of version 2", "sample 5 of version 3"),
    ]


def test_engines_know_for_which_step_they_sample():
    """The threads of two steps hand their requests over in any order; those of the earlier step come first."""
    world, told = Mixing(), []

    def unattended(*, step):
        told.append(step)
        return world

    world.unattended = unattended
    _, step = loop(world, max_staleness=1, partial=True)
    for number in (1, 2, 3):
        step(number)
    assert told == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("dies", "is_replaced_by_push", "expected"),
    [
        ("before the push", False, ["push 1", "push 2"]),
        ("after the push", False, ["push 1", "push 1", "push 2"]),  # its successor needs the weights that others have
        ("after the push", True, ["push 1", "push 2"]),  # the push found it dead and gave them to its successor
    ],
)
def test_a_loss_is_made_up_with_the_same_prompts(dies, is_replaced_by_push, expected):
    world = Mixing()
    is_first = True

    def while_sampling(step):
        nonlocal is_first
        if step == 2 and is_first:
            is_first = False
            if dies == "after the push":
                world.wait_for("push 1")
                world.is_lost = not is_replaced_by_push
            raise EngineLostError("rollout engine died in rollout")

    world.while_sampling = while_sampling
    pipeline, step = loop(world, max_staleness=1, partial=True)
    update = world.update

    def update_after_the_loss(*, step):
        if step == 1 and dies == "before the push":
            pipeline._running[2].thread.join(PATIENCE_S)
        return update(step=step)

    world.update = update_after_the_loss
    step(1)
    report = step(2)
    assert groups(report) == [2, 3]
    assert to_scalars(report.metrics)["rollout/staleness_count"] == 0
    assert pushes(world) == expected
    assert [line for line in samples(world) if line.startswith("sample 2")] == [
        "sample 2 of version 0",
        "sample 2 of version 1",
    ]
    assert groups(step(3)) == [4, 5]


def test_a_checkpoint_holds_whole_responses(tmp_path):
    """What was in flight is neither lost nor sampled twice, and each token keeps its version."""
    world = Mixing()
    world.while_sampling = world.wait_for_the_next_push
    pipeline, step = loop(world, max_staleness=1, partial=True)
    step(1)
    pipeline.drain()
    assert not world.in_flight
    torch.save(pipeline.state_dict(), tmp_path / "rollouts.pt")
    expected = step(2).sampled.rollouts.payload

    again = Mixing()
    again.version = 1
    pipeline, step = loop(again, max_staleness=1, partial=True, num_steps=2)
    pipeline.begin_at(2)
    pipeline.load_state_dict(torch.load(tmp_path / "rollouts.pt", weights_only=True))
    found = step(2).sampled.rollouts.payload
    assert samples(again) == []
    assert torch.equal(found.response_ids, expected.response_ids)
    assert torch.equal(found.token_versions, expected.token_versions)
    assert found.policy_version == 0
    assert found.is_multi_version.any()


class Guarded(Mixing):
    """Nobody measures, checks or saves while responses are written."""

    def __init__(self):
        super().__init__()
        self.num_guarded = 0
        self.on_save = self.guard
        self.while_sampling = self.sample_slowly

    def sample_slowly(self, step):
        if threading.current_thread() is not threading.main_thread():
            self.wait_for_the_next_push(step)
            time.sleep(0.05)

    def generate(self, prompts, sampling, *, samples_per_prompt, seed):
        if threading.current_thread() is threading.main_thread():
            self.guard()
        return super().generate(prompts, sampling, samples_per_prompt=samples_per_prompt, seed=seed)

    def guard(self):
        self.num_guarded += 1
        assert not self.in_flight


def test_who_else_needs_the_engines_waits_until_nothing_is_in_flight(tmp_path):
    world = Guarded()
    run(RunFolder(tmp_path), world, rollout={"max_staleness": 1, "partial": True})
    # two sets measured before and after, the last push's check, two checkpoints
    assert world.num_guarded == 2 + 2 + 1 + 2
    rows = read_metrics(tmp_path / "metrics.jsonl")[1:]
    assert [row["rollout/staleness_count"] for row in rows] == [0, 1, 1, 1]
    assert [row["rollout/multi_version_count"] > 0 for row in rows] == [False, True, True, True]
