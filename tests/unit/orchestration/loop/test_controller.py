"""The loop's bookkeeping over stages that do nothing: what is written when, and what a crash leaves."""

import dataclasses

import pytest
import torch

from gtpo_megatron.batch import Problem, RewardBatch
from gtpo_megatron.config.algorithm import GTPOConfig, OffPolicyConfig
from gtpo_megatron.evaluation.evaluator import HeldOutSet
from gtpo_megatron.observability.metrics import Max, deterministic
from gtpo_megatron.observability.progress import TrainingDisplay
from gtpo_megatron.observability.sinks import MetricSinks
from gtpo_megatron.observability.timers import StageTimers
from gtpo_megatron.orchestration.loop.controller import Controller
from gtpo_megatron.orchestration.loop.inputs import RunInputs
from gtpo_megatron.orchestration.stages.stages import MemorySharing, Stages
from gtpo_megatron.run_folder.checkpoints import CheckpointFolder
from gtpo_megatron.run_folder.folder import RunFolder
from gtpo_megatron.run_folder.metrics_file import JsonlSink, read_metrics, truncate_after
from gtpo_megatron.weights.push.sync import WeightSync
from recipes import tiny_cpu
from tests.unit.orchestration.checkpoints import facts
from tests.unit.orchestration.gaps import gaps
from tests.unit.orchestration.loop.test_sampling import WrittenDown

EVALUATION_SEED = 5
PROBLEMS = [Problem(problem_id=str(i), prompt_ids=(1,), answer="1") for i in range(6)]


class World(WrittenDown):
    """Sampler, reward and trainer; the policy version goes up, nothing else happens."""

    def __init__(self):
        super().__init__(None)
        self.version = 0
        self.saved = []
        self.measured = []
        self.on_save = lambda: None
        self.checkpoint = self.balance = self

    def run_on_all(self, stage, function):
        return [function(self)]

    def generate(self, prompts, sampling, *, samples_per_prompt, seed):
        handle = super().generate(prompts, sampling, samples_per_prompt=samples_per_prompt, seed=seed)
        if seed == EVALUATION_SEED:
            self.measured.append(self.version)
        return dataclasses.replace(handle, policy_version=self.version)

    def grade(self, rollouts, prompts):
        num = len(rollouts.response_lengths)
        return RewardBatch(rewards=torch.arange(num).remainder(2).float(), failed=torch.zeros(num, dtype=torch.bool))

    def score_tokens(self, rollouts, *, updates=()):
        return gaps(0.0)

    def credit_tokens(self, rewards):
        return {}

    def release_batch(self):
        pass

    def update(self, *, step):
        return {"policy/loss": Max(float(step))}

    def transfer(self, version, *, with_checksums):
        self.version = version
        return {}, {}

    def forget_prefixes(self):
        pass

    def loads_by_layer(self):
        return {}

    def begin(self, folder, *, in_background):
        self.on_save()
        self.saved.append(folder.name.split(".")[1])

    def is_written(self):
        return True

    def finish(self):
        return {}

    def load(self, folder, *, checksums):
        self.saved.append(f"loaded {folder.name}")


class RecordedSharing(MemorySharing):
    """Writes down whose turn it is, between what the world writes down."""

    def __init__(self, log):
        self._log = log

    def to_trainer(self, *, keep_weights=False):
        self._log.append("trainer, engine keeps its weights" if keep_weights else "trainer")

    def to_push(self):
        self._log.append("push")

    def to_engine(self):
        self._log.append("engine")


def run(
    folder,
    world,
    checkpoint=None,
    memory_sharing=None,
    rollout=None,
    measure_every=0,
    measure_at_start=True,
    keep_best=0,
    **options,
):
    """The whole run, or its rest from a checkpoint."""
    config = tiny_cpu.gtpo(num_steps=4)
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, prompts_per_step=2),
        rollout=dataclasses.replace(config.rollout, group_size=2, **(rollout or {})),
        algorithm=GTPOConfig(off_policy=OffPolicyConfig(mode="truncate")) if rollout else config.algorithm,
        evaluation=dataclasses.replace(
            config.evaluation,
            samples=2,
            at_start=measure_at_start,
            every_steps=measure_every,
            seed=EVALUATION_SEED,
        ),
        checkpoint=dataclasses.replace(config.checkpoint, every_steps=2, keep=1, keep_best=keep_best),
        logging=dataclasses.replace(config.logging, rollout_groups_per_step=0),
    )
    folder.open(config, resume=checkpoint is not None)
    stages = Stages(
        engine=world,
        grade=world.grade,
        trainer=world,
        weight_sync=WeightSync(config.weight_sync, world.transfer),
        memory_sharing=memory_sharing or MemorySharing(None, None, is_colocated=False, timers=StageTimers()),
        timers=StageTimers(),
        open_link=lambda _: None,
    )
    heldout = HeldOutSet(label="heldout", problems=PROBLEMS[:2], num_contaminated=1)
    other = HeldOutSet(label="aime24", problems=PROBLEMS[2:5])
    inputs = RunInputs(tokenizer=None, train=PROBLEMS, heldout=(heldout, other))
    if checkpoint:
        truncate_after(folder.path / "metrics.jsonl", checkpoint.last_row)
    display = TrainingDisplay(num_steps=4, title="test", is_live=False)
    try:
        with MetricSinks({"jsonl": JsonlSink(folder.path / "metrics.jsonl")}) as sinks:
            return Controller(config, folder, facts(), inputs, stages, sinks, display, **options).run(checkpoint)
    finally:
        folder.close()


def test_the_trainer_holds_no_batch_after_a_step(tmp_path):
    world, calls = World(), []
    score = world.score_tokens

    def score_tokens(rollouts, **updates):
        calls.append("score")
        return score(rollouts, **updates)

    world.score_tokens = score_tokens
    world.release_batch = lambda: calls.append("release")
    run(RunFolder(tmp_path), world)
    # the last push is checked by a scoring of its own
    assert calls == ["score", "release"] * 3 + ["score", "score", "release"]


def test_every_step_has_its_row_before_its_checkpoint(tmp_path):
    folder, world = RunFolder(tmp_path), World()
    rows_at_save = []
    world.on_save = lambda: rows_at_save.append([row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")])
    summary = run(folder, world)
    assert rows_at_save == [[0, 1, 2], [0, 1, 2, 3, 4]]
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [result.label for result in summary.before] == ["heldout", "aime24"]
    assert summary.before[0].mean_at_k == summary.after[0].mean_at_k == 0.5
    assert {"eval/heldout_mean_at_k", "eval/aime24_mean_at_k"} <= set(rows[4])
    assert (rows[0]["eval/heldout_contaminated_count"], rows[0]["eval/aime24_contaminated_count"]) == (1, 0)
    assert rows[3]["rollout/responses_count"] == 4
    assert world.version == 4


def test_a_run_may_begin_without_a_measurement(tmp_path):
    world = World()
    summary = run(RunFolder(tmp_path), world, measure_at_start=False)
    assert set(world.measured) == {4}
    assert (summary.before, summary.after[0].mean_at_k) == (None, 0.5)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval/heldout_mean_at_k" in row] == [4]
    assert rows[0]["eval/heldout_contaminated_count"] == 1  # it is said all the same


def test_a_resumed_run_counts_groups_on(tmp_path):
    folder, world = RunFolder(tmp_path), World()

    def stop_at_the_second_save():
        if world.saved:
            raise KeyboardInterrupt

    world.on_save = stop_at_the_second_save
    with pytest.raises(KeyboardInterrupt):
        run(folder, world)
    checkpoint = folder.checkpoints.latest()
    state = checkpoint.state
    assert state.step == 2
    assert state.counters["groups"] == 4
    assert state.sampler["position"] == 4
    world.on_save = lambda: None
    again = World()
    summary = run(folder, again, checkpoint)
    assert again.saved[0] == "loaded step_2"
    assert summary.before is None
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    assert folder.checkpoints.latest().state.counters["groups"] == 8


def test_a_run_that_is_asked_to_stop_is_saved_there_and_goes_on(tmp_path):
    folder, world = RunFolder(tmp_path), World()
    summary = run(folder, world, stop_reason=lambda: "time limit" if world.version == 3 else "")
    assert (summary.stopped_after, summary.stop_reason, summary.after) == (3, "time limit", None)
    assert world.saved == ["step_2", "step_3"]
    checkpoint = folder.checkpoints.latest()
    assert checkpoint.state.step == 3
    summary = run(folder, world, checkpoint)
    assert summary.stopped_after is None
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4]


def test_a_request_during_a_save_is_met_by_it(tmp_path):
    folder, world = RunFolder(tmp_path), World()
    summary = run(folder, world, stop_reason=lambda: "time limit" if world.saved else "")
    assert (summary.stopped_after, world.saved, world.version) == (2, ["step_2"], 2)
    checkpoint = folder.checkpoints.latest()
    summary = run(folder, world, checkpoint, stop_reason=lambda: "late" if "step_4" in world.saved else "")
    assert summary.stopped_after is None, "the last save is the run's end"


def test_a_request_while_the_last_set_is_measured_changes_nothing(tmp_path):
    world = World()
    summary = run(RunFolder(tmp_path), world, stop_reason=lambda: "late" if len(world.measured) == 4 else "")
    assert world.measured == [0, 0, 4, 4]
    assert summary.stopped_after is None
    assert summary.after is not None


def rows_of(path):
    """What a run computed."""
    return [deterministic(row) for row in read_metrics(path / "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("num_measured", [2, 3])
@pytest.mark.parametrize("at", [2, 4])
def test_a_request_before_a_set_is_measured_puts_the_measurement_off(tmp_path, at, num_measured):
    """Nothing that a step has done is lost, and what comes out is what an unbroken run writes; at the last step too."""
    whole = RunFolder(tmp_path / "whole")
    run(whole, World(), measure_every=2, keep_best=1)
    folder, world = RunFolder(tmp_path / "broken"), World()

    def stop():
        return "time limit" if world.version == at and len(world.measured) >= at - 2 + num_measured else ""

    summary = run(folder, world, measure_every=2, keep_best=1, stop_reason=stop)
    assert (summary.stopped_after, summary.stop_reason, summary.after) == (at, "time limit", None)
    checkpoint = folder.checkpoints.latest("full")
    assert checkpoint.state.step == at
    assert checkpoint.manifest.scores == {}
    assert [row["step"] for row in rows_of(folder.path)] == list(range(at)), "the step's row is not whole yet"

    again = World()
    summary = run(folder, again, checkpoint, measure_every=2, keep_best=1, stop_reason=lambda: "at once")
    assert (summary.stopped_after, again.saved, again.measured) == (at, [f"loaded step_{at}"], [])
    assert folder.checkpoints.latest("full").unmeasured == checkpoint.unmeasured, "still to be measured"

    summary = run(folder, (again := World()), folder.checkpoints.latest("full"), measure_every=2, keep_best=1)
    assert again.measured[:2] == [at, at]
    assert (summary.stopped_after, summary.after[0].mean_at_k) == (None, 0.5)
    assert rows_of(folder.path) == rows_of(whole.path)
    last = folder.checkpoints.latest("full")
    assert last.unmeasured is None
    assert last.manifest.scores == whole.checkpoints.latest().manifest.scores != {}
    for name in ("latest", "best"):
        assert (folder.checkpoints.path / name).read_text() == (whole.checkpoints.path / name).read_text()
    assert sorted(p.name for p in folder.checkpoints.path.iterdir()) == sorted(
        p.name for p in whole.checkpoints.path.iterdir()
    )


def test_a_crash_after_the_row_that_was_put_off_leaves_it_there_once(tmp_path, monkeypatch):
    folder, world = RunFolder(tmp_path), World()
    run(folder, world, measure_every=2, stop_reason=lambda: "limit" if world.version == 2 else "")
    with monkeypatch.context() as broken:
        broken.setattr(
            CheckpointFolder, "record_measurement", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            run(folder, World(), folder.checkpoints.latest(), measure_every=2)
    assert [row["step"] for row in rows_of(tmp_path)] == [0, 1, 2]
    run(folder, World(), folder.checkpoints.latest(), measure_every=2)
    assert [row["step"] for row in rows_of(tmp_path)] == [0, 1, 2, 3, 4]


def test_a_measurement_is_made_up_for_without_a_manifest(tmp_path, caplog):
    """``--checkpoint.verify none`` goes on from what is left of a checkpoint, here as elsewhere."""
    folder, world = RunFolder(tmp_path), World()
    run(folder, world, measure_every=2, stop_reason=lambda: "limit" if world.version == 2 else "")
    (folder.checkpoints.path / "step_2" / "manifest.json").unlink()
    checkpoint = folder.checkpoints.latest("none")
    assert checkpoint.unmeasured is not None
    summary = run(folder, World(), checkpoint, measure_every=2)
    assert summary.stopped_after is None
    assert [row["step"] for row in rows_of(tmp_path)] == [0, 1, 2, 3, 4]
    assert "step_2 was taken up unverified: its scores are in the metrics alone" in caplog.text
    assert not (folder.checkpoints.path / "step_2" / "unmeasured.json").exists()


@pytest.mark.parametrize("num_measured", [0, 1])
def test_a_request_before_the_first_step_leaves_nothing_behind(tmp_path, num_measured):
    folder, world = RunFolder(tmp_path), World()
    summary = run(folder, world, stop_reason=lambda: "limit" if len(world.measured) == num_measured else "")
    assert (summary.stopped_after, summary.before) == (0, None)
    assert (world.saved, len(world.measured)) == ([], num_measured)
    assert folder.checkpoints.latest() is None
    assert rows_of(tmp_path) == []


def test_an_engine_on_the_same_gpus_sleeps_while_a_checkpoint_is_read_and_written(tmp_path):
    folder, world = RunFolder(tmp_path), World()
    sharing = RecordedSharing(world.saved)
    run(folder, world, memory_sharing=sharing)
    cycle = ["trainer", "push", "engine"]

    def save(step):
        return ["trainer, engine keeps its weights", f"step_{step}", "push", "engine"]

    assert world.saved == [*cycle, *cycle, *cycle, *save(2), *cycle, *cycle, *save(4)]
    del world.saved[:]
    run(folder, world, folder.checkpoints.latest(), sharing)
    assert world.saved == ["trainer", "loaded step_4", "push", "engine"]
