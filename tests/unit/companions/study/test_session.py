from contextlib import nullcontext
from threading import Barrier, Event

import pytest

from gtpo_megatron.companions import training_process
from gtpo_megatron.companions.study import session
from gtpo_megatron.companions.study.plan import planned_runs
from gtpo_megatron.companions.study.runs_file import read_runs
from gtpo_megatron.companions.study.session import ProcessTrainer, run_session
from gtpo_megatron.errors import ConfigError, WorkerError
from tests.unit.companions.study.makers import STUDY, finish


class World:
    """Trains at once; a run takes a hundred seconds of its own clock."""

    def __init__(self, folder, *, stops_at="", fails_at="", seconds=100.0):
        self.folder, self.stops_at, self.fails_at, self.seconds = folder, stops_at, fails_at, seconds
        self.now, self.trained, self.notes, self.is_abandoned = 0.0, [], [], False

    def abandon(self):
        self.is_abandoned = True

    def __call__(self, planned):
        self.now += self.seconds
        self.trained.append(planned.name)
        if planned.name == self.fails_at:
            raise WorkerError("rank 1 died in update")
        if planned.name == self.stops_at:
            return False
        finish(planned, self.folder / "runs" / planned.name)
        return True

    def session(self, *, arms=("gtpo", "grpo"), num_seeds=2, num_steps=4, minutes=1e9, side_by_side=1, shared=()):
        return run_session(
            planned_runs(STUDY, arms, num_seeds=num_seeds, num_steps=num_steps),
            self,
            runs_dir=self.folder / "runs",
            folders=[self.folder / "out", *shared],
            side_by_side=side_by_side,
            deadline=60 * minutes,
            note=self.notes.append,
            clock=lambda: self.now,
        )


ALL = ["gtpo_seed0", "grpo_seed0", "gtpo_seed1", "grpo_seed1"]


def finished(folder):
    return [run.name for run in read_runs(folder / "out")]


def test_all_runs_in_order_and_none_twice(tmp_path):
    world = World(tmp_path)
    report = world.session()
    assert world.trained == ALL
    assert report.missing == []
    assert finished(tmp_path) == sorted(ALL)
    again = World(tmp_path)
    assert again.session().missing == []
    assert again.trained == []


def test_a_session_ends_when_time_is_up_and_the_next_goes_on(tmp_path):
    world = World(tmp_path)
    report = world.session(
        minutes=5
    )  # 300 s: 100, 200, and 100 are too few to start, since the last 90 are for stopping
    assert world.trained == ALL[:2]
    assert report.missing == ALL[2:]
    assert "time is up: 2 runs are still to be done" in world.notes[-1]
    following = World(tmp_path)
    following.session()
    assert following.trained == ALL[2:]


def test_a_run_that_is_stopped_has_no_summary_and_is_first_in_the_next_session(tmp_path):
    world = World(tmp_path, stops_at="grpo_seed0")
    report = world.session()
    assert report.missing == ALL[1:]
    assert "grpo_seed0: stopped" in world.notes[-1]
    assert "grpo_seed0" not in finished(tmp_path)
    following = World(tmp_path)
    following.session()
    assert following.trained[0] == "grpo_seed0"


def test_a_run_that_fails_is_tried_once_more_after_the_others(tmp_path):
    class Once(World):
        def __call__(self, planned):
            if planned.name in self.trained:
                self.fails_at = ""
            return super().__call__(planned)

    world = Once(tmp_path, fails_at="grpo_seed0")
    report = world.session()
    assert world.trained == [*ALL, "grpo_seed0"]
    assert (report.failed, report.missing) == ({}, [])
    assert "grpo_seed0: run 2 of 4, again" in world.notes


def test_runs_side_by_side_are_the_same_runs(tmp_path):
    both = Barrier(2)  # passed only by two at once

    class Together(World):
        def __call__(self, planned):
            both.wait(timeout=30)
            return super().__call__(planned)

    world = Together(tmp_path)
    assert world.session(side_by_side=2).missing == []
    assert sorted(world.trained) == sorted(ALL)
    alone = World(tmp_path / "alone")
    alone.session()
    assert read_runs(tmp_path / "out") == read_runs(tmp_path / "alone" / "out")


def test_an_interrupted_session_abandons_what_is_being_trained(tmp_path):
    ended = Event()

    class Interrupted(World):
        def __call__(self, planned):
            if planned.name == "gtpo_seed0":
                raise KeyboardInterrupt  # comes out of the session as if it had met the main thread
            assert ended.wait(timeout=30)
            return False

        def abandon(self):
            super().abandon()
            ended.set()

    world = Interrupted(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        world.session(side_by_side=2)
    assert world.is_abandoned


def test_runs_of_another_study_are_not_made_again(tmp_path):
    World(tmp_path / "main").session(num_seeds=1)
    world = World(tmp_path)
    world.session(shared=[tmp_path / "main" / "out"])
    assert world.trained == ALL[2:]
    assert "gtpo_seed0" not in finished(tmp_path)
    with pytest.raises(ConfigError, match="of a run with other settings"):
        World(tmp_path / "more").session(shared=[tmp_path / "main" / "out"], num_steps=5)


def test_a_run_that_fails_is_noted_and_the_others_go_on(tmp_path):
    world = World(tmp_path, fails_at="grpo_seed0")
    report = world.session()
    assert finished(tmp_path) == sorted([ALL[0], *ALL[2:]])
    assert world.trained == [*ALL, "grpo_seed0"]  # twice, and not more often
    assert report.failed == {"grpo_seed0": "WorkerError: rank 1 died in update"}
    assert report.missing == ["grpo_seed0"]


def test_a_summary_that_fails_in_any_way_is_that_of_a_failed_run(tmp_path, monkeypatch):
    def broken(planned, run_dir):
        if planned.name == "grpo_seed0":
            raise KeyError("advantages")
        return summarise(planned, run_dir)

    class GoesOn(World):
        def __call__(self, planned):
            return (self.folder / "runs" / planned.name).exists() or super().__call__(planned)

    summarise = session.summarise
    monkeypatch.setattr(session, "summarise", broken)
    world = GoesOn(tmp_path)
    report = world.session()
    assert report.failed == {"grpo_seed0": "KeyError: 'advantages'"}
    assert finished(tmp_path) == sorted([ALL[0], *ALL[2:]])
    assert "grpo_seed0 failed: KeyError: 'advantages'" in world.notes


def test_summaries_of_other_settings_are_refused_before_anything_starts(tmp_path):
    World(tmp_path).session()
    world = World(tmp_path)
    with pytest.raises(ConfigError, match=r"runs\.jsonl: gtpo_seed0 is of a run with other settings"):
        world.session(num_steps=5)
    assert world.trained == []
    more = World(tmp_path)
    more.session(num_seeds=3)
    assert more.trained == ["gtpo_seed2", "grpo_seed2"]


class FakeProcess:
    """In the place of a training process."""

    ends = True

    def __init__(self, config_file, folder, *, output, resume):
        self.calls.append((config_file.name, folder.name, output.name, resume))
        self.folder = folder

    def wait_until(self, deadline):
        self.calls.append(f"until {deadline}")
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.yaml").touch()
        return "finished" if self.ends else "running"

    def stop(self, *, within_s):
        self.calls.append(f"stop {within_s}")
        return "stopped"

    def kill(self):
        self.calls.append("kill")


def test_a_run_is_trained_in_a_process_and_goes_on_where_it_was(tmp_path, monkeypatch):
    FakeProcess.calls = calls = []
    monkeypatch.setattr(session, "TrainingProcess", FakeProcess)
    planned = planned_runs(STUDY, ("gtpo",), num_seeds=1, num_steps=4)[0]
    trainer = ProcessTrainer(tmp_path / "runs", deadline=1000.0)
    monkeypatch.setattr(FakeProcess, "ends", False)
    assert not trainer(planned)
    monkeypatch.setattr(FakeProcess, "ends", True)
    assert trainer(planned)
    first = ("gtpo_seed0.yaml", "gtpo_seed0", "gtpo_seed0.out", False)
    until = "until 910.0"  # what it takes to stop lies within the session's time
    assert calls == [first, until, "stop 90.0", "kill", (*first[:3], True), until, "kill"]
    assert "study_gtpo" in (tmp_path / "runs" / "gtpo_seed0.yaml").read_text()
    assert set(vars(FakeProcess)) - {"ends"} <= set(dir(training_process.TrainingProcess)) | {"calls"}


@pytest.mark.parametrize("ends_how", ["saved", "failed", "interrupted again"])
def test_an_abandoned_trainer_has_its_runs_saved_and_starts_none(tmp_path, monkeypatch, ends_how):
    FakeProcess.calls = calls = []
    planned = planned_runs(STUDY, ("gtpo",), num_seeds=1, num_steps=4)[0]
    trainer = ProcessTrainer(tmp_path / "runs", deadline=1000.0)

    class Abandoned(FakeProcess):
        def wait_until(self, deadline):
            if "ask" not in calls:
                with pytest.raises(KeyboardInterrupt) if ends_how == "interrupted again" else nullcontext():
                    trainer.abandon()
                return "stopped"
            if ends_how == "failed":
                raise WorkerError("ended with status 1")
            if ends_how == "interrupted again":
                raise KeyboardInterrupt
            return "stopped"

        def ask_to_stop(self):
            calls.append("ask")

    monkeypatch.setattr(session, "TrainingProcess", Abandoned)
    assert not trainer(planned)
    assert calls[1:] == ["ask", "kill", "kill"]
    assert not trainer(planned)
    assert len(calls) == 4
