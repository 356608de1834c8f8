import pytest

from gtpo_megatron.errors import ConfigError, WorkerError
from gtpo_megatron.orchestration import training_process
from gtpo_megatron.study import session
from gtpo_megatron.study.plan import planned_runs
from gtpo_megatron.study.session import ProcessTrainer, run_session
from tests.unit.study.makers import STUDY, finish


class World:
    """Trains at once; a run takes a hundred seconds of its own clock."""

    def __init__(self, folder, *, stops_at="", fails_at="", seconds=100.0):
        self.folder, self.stops_at, self.fails_at, self.seconds = folder, stops_at, fails_at, seconds
        self.now, self.trained, self.notes = 0.0, [], []

    def train(self, planned):
        self.now += self.seconds
        self.trained.append(planned.name)
        if planned.name == self.fails_at:
            raise WorkerError("rank 1 died in update")
        if planned.name == self.stops_at:
            return False
        finish(planned, self.folder / "runs" / planned.name)
        return True

    def session(self, *, arms=("gtpo", "grpo"), num_seeds=2, num_steps=4, minutes=1e9):
        return run_session(
            planned_runs(STUDY, arms, num_seeds=num_seeds, num_steps=num_steps),
            self.train,
            runs_dir=self.folder / "runs",
            output=self.folder / "out",
            deadline=60 * minutes,
            note=self.notes.append,
            clock=lambda: self.now,
        )


ALL = ["gtpo_seed0", "grpo_seed0", "gtpo_seed1", "grpo_seed1"]


def test_all_runs_in_order_and_none_twice(tmp_path):
    world = World(tmp_path)
    report = world.session()
    assert world.trained == ALL
    assert report.missing == []
    assert sorted(path.stem for path in (tmp_path / "out").iterdir()) == sorted(ALL)
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
    assert not (tmp_path / "out" / "grpo_seed0.json").exists()
    following = World(tmp_path)
    following.session()
    assert following.trained[0] == "grpo_seed0"


def test_a_run_that_fails_is_noted_and_the_others_go_on(tmp_path):
    world = World(tmp_path, fails_at="grpo_seed0")
    report = world.session()
    assert sorted(path.stem for path in (tmp_path / "out").iterdir()) == sorted([ALL[0], *ALL[2:]])
    assert report.failed == {"grpo_seed0": "WorkerError: rank 1 died in update"}
    assert report.missing == ["grpo_seed0"]


def test_summaries_of_other_settings_are_refused_before_anything_starts(tmp_path):
    World(tmp_path).session()
    world = World(tmp_path)
    with pytest.raises(ConfigError, match=r"gtpo_seed0\.json is of a run with other settings"):
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
