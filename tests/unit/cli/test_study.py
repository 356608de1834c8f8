import os
import signal
import subprocess
import sys

import pytest

from gtpo_megatron.cli import dispatch
from gtpo_megatron.cli.study import SESSION_LOCK, load_study
from gtpo_megatron.companions.study import session
from gtpo_megatron.companions.study.plan import planned_runs
from gtpo_megatron.companions.study.runs_file import append_run, read_runs
from gtpo_megatron.errors import ConfigError, WorkerError
from tests.unit.companions.study.makers import STUDY, summaries


@pytest.fixture
def folders(tmp_path):
    runs = planned_runs(STUDY, ("gtpo", "grpo"), num_seeds=2, num_steps=4)
    for summary in summaries(runs, tmp_path / "made"):
        append_run(tmp_path / "out", summary)
    return ["--output", str(tmp_path / "out"), "--runs-dir", str(tmp_path / "runs")]


def test_a_study_that_is_done_is_only_drawn(folders, tmp_path, capsys):
    arguments = ["study", *folders, "--num-steps", "4", "--num-seeds", "2", "--arms", "gtpo", "grpo"]
    assert dispatch.run(arguments) == 0
    assert "4 runs: " in capsys.readouterr().out
    assert "| GTPO v6 | 2 |" in (tmp_path / "out" / "table.md").read_text()
    assert "GTPO v6" in (tmp_path / "runs" / "study.html").read_text()


def test_another_baseline_has_a_table_and_a_page_of_its_own(folders, tmp_path, capsys):
    arguments = ["study", *folders, "--table-only", "--num-steps", "4"]
    assert dispatch.run(arguments) == 0
    own = (tmp_path / "out" / "table.md").read_text()
    assert dispatch.run([*arguments, "--baseline", "gtpo"]) == 0
    assert (tmp_path / "out" / "table.md").read_text() == own
    other = (tmp_path / "out" / "table_gtpo.md").read_text()
    assert "Difference: to GRPO with" in own
    assert "Difference: to GTPO v6 with" in other
    assert (tmp_path / "runs" / "study_gtpo.html").exists()
    assert dispatch.run([*arguments, "--baseline", "ppo"]) == 2
    assert "--baseline 'ppo': the study" in capsys.readouterr().err
    assert dispatch.run([*arguments, "--arms", "gtpo", "ppo"]) == 2
    assert "--arms 'ppo': the study" in capsys.readouterr().err
    assert dispatch.run([*arguments, "--baseline", "dapo"]) == 0
    assert "No run of DAPO has an outcome, so there are no" in (tmp_path / "out" / "table_dapo.md").read_text()


def test_what_is_missing_is_left_for_later_when_there_is_no_time(folders, tmp_path, capsys):
    arguments = [
        "study",
        *folders,
        "--num-steps",
        "4",
        "--num-seeds",
        "3",
        "--arms",
        "gtpo",
        "grpo",
        "--minutes",
        "0.5",
    ]
    assert dispatch.run([*arguments, "--minutes", "0.5"]) == 75
    out = capsys.readouterr().out
    assert "2 runs are still to be done" in out
    assert "4 runs: " in out


def test_an_interrupted_session_has_its_table_and_is_gone_on_with(folders, tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "run_session", interrupted)
    assert dispatch.run(["study", *folders, "--num-steps", "4", "--num-seeds", "3"]) == 130
    said = capsys.readouterr()
    assert "interrupted; the same command goes on" in said.out
    assert "4 runs: " in said.out
    assert "--resume" not in said.out + said.err
    assert (tmp_path / "out" / "table.md").exists()


def test_only_the_table_of_what_there_is(folders, tmp_path, capsys):
    assert dispatch.run(["study", *folders, "--table-only", "--num-steps", "4"]) == 0
    assert "4 runs: " in capsys.readouterr().out
    assert dispatch.run(["study", *folders, "--table-only"]) == 0
    said = capsys.readouterr().out  # the runs of 4 steps are of another study
    assert "no finished run of 24 steps" in said
    assert "(4 with other settings left out)" in " ".join(said.split())
    assert dispatch.run(["study", "--table-only", "--output", str(tmp_path / "none")]) == 0
    assert f"there is no folder {tmp_path / 'none'}" in " ".join(capsys.readouterr().out.split())


def test_the_table_has_all_arms_whichever_were_asked_for_last(folders, tmp_path, capsys):
    extra = planned_runs(STUDY, ("gtpo_v1",), num_seeds=1, num_steps=8)
    append_run(tmp_path / "out", *summaries(extra, tmp_path / "more"))
    asked = ["--num-steps", "4", "--num-seeds", "2", "--arms", "gtpo"]
    assert dispatch.run(["study", *folders, *asked]) == 0
    assert "4 runs (1 with other settings left out): " in capsys.readouterr().out
    rows = (tmp_path / "out" / "table.md").read_text().split("\n\n")[1].splitlines()[2:4]
    assert [row.split("|")[1].strip() for row in rows] == ["GTPO v6", "GRPO"]
    assert "+10.1" in rows[0]


def test_runs_too_short_for_the_outcome_are_refused_before_anything_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(session, "run_session", None)
    asked = ["study", "--study", "recipes.study:pretrained", "--output", str(tmp_path / "out"), "--num-steps", "4"]
    assert dispatch.run([*asked, "--runs-dir", str(tmp_path / "runs")]) == 2
    assert "num_steps=4: the outcome of the study" in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


SECRET = "40.6"
"""What the runs of the fixture reached, in percent."""


def test_a_blind_study_shows_nothing_before_its_last_run(folders, tmp_path, capsys):
    asked = ["study", *folders, "--table-only", "--num-steps", "4", "--arms", "gtpo", "grpo", "--blind"]
    assert dispatch.run([*asked, "--num-seeds", "3"]) == 0
    out = capsys.readouterr().out
    assert out == (
        "4 of 6 runs are done, 2 are missing; those done trained for 2 minutes. Table and page are written with the "
        "last one\n"
    )
    assert not (tmp_path / "out" / "table.md").exists()
    assert not (tmp_path / "runs").exists()
    assert dispatch.run([*asked, "--num-seeds", "2"]) == 0
    assert "4 runs: " in capsys.readouterr().out
    assert SECRET in (tmp_path / "out" / "table.md").read_text()


def test_the_failure_of_a_run_shows_no_accuracy_in_a_blind_study(folders, tmp_path, capsys, monkeypatch):
    def fails(self, planned):
        raise WorkerError(f"the run in {planned.name} ended with status 1:\nheld-out mean@4 {SECRET}%")

    monkeypatch.setattr(session.ProcessTrainer, "__call__", fails)
    asked = ["study", *folders, "--num-steps", "4", "--arms", "gtpo", "grpo", "--num-seeds", "3", "--side-by-side", "2"]
    assert dispatch.run([*asked, "--blind"]) == 1
    said = capsys.readouterr()
    assert "gtpo_seed2 failed: WorkerError: the run in gtpo_seed2 ended with status 1:\n" in said.out
    assert SECRET not in said.out + said.err
    assert not (tmp_path / "out" / "table.md").exists()


def test_runs_of_another_study_are_taken_from_its_folder(folders, tmp_path, capsys):
    asked = ["study", "--table-only", "--num-steps", "4", "--arms", "gtpo", "grpo", "--num-seeds", "2"]
    own = ["--output", str(tmp_path / "own"), "--runs-dir", str(tmp_path / "runs")]
    assert dispatch.run([*asked, *own, "--blind", "--shared", str(tmp_path / "out")]) == 0
    assert "4 runs: " in capsys.readouterr().out
    assert (tmp_path / "own" / "table.md").exists()
    assert not (tmp_path / "out" / "table.md").exists()


def test_arms_of_another_study_have_no_more_seeds_than_the_studys_own(folders, tmp_path, capsys):
    own = next(run for run in read_runs(tmp_path / "out") if run.name == "gtpo_seed0")
    append_run(tmp_path / "own", own)
    own = ["--output", str(tmp_path / "own"), "--runs-dir", str(tmp_path / "runs"), "--shared", str(tmp_path / "out")]
    assert dispatch.run(["study", "--table-only", "--num-steps", "4", *own]) == 0
    assert "2 runs: " in capsys.readouterr().out
    assert "| GRPO | 1 |" in (tmp_path / "own" / "table.md").read_text()


def test_a_study_whose_model_is_not_made_yet_says_how(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert dispatch.run(["study", "--study", "recipes.study:second_size", "--output", "out"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "runs/models/small_qwen2/model.safetensors is not there" in said
    assert "make it: .venv/bin/python -m tools.make_tiny_model" in said


def test_folders_that_cannot_be_are_named_before_anything_is_trained(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(session, "run_session", lambda *_, **__: pytest.fail("trained"))
    file = tmp_path / "file"
    file.touch()
    for asked, said in (
        (["--output", str(file)], "is a file, expected a folder"),
        (["--shared", str(tmp_path / "mistyped")], "there is no such folder of a study"),
        (["--shared", str(file)], "there is no such folder of a study"),
        (["--shared", ""], "there is no such folder of a study"),
        (["--study", "recipes.study:dose"], "needs an --output: benchmarks/results/study has another study's table"),
        (["--output", str(tmp_path / "new"), "--runs-dir", str(file / "runs")], "cannot be written: Not a directory"),
    ):
        assert dispatch.run(["study", "--num-steps", "4", *asked]) == 2
        assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("what", ["table", "page"])
def test_a_table_that_cannot_be_written_says_where_it_goes(folders, tmp_path, capsys, what):
    in_the_way = tmp_path / "out" / "table.md" if what == "table" else tmp_path / "runs"
    if what == "table":
        in_the_way.mkdir()
    else:
        in_the_way.touch()
    assert dispatch.run(["study", *folders, "--table-only", "--num-steps", "4"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{in_the_way}: cannot be written (" in said
    assert "choose others, or change what is in the way there" in said


def test_a_reader_that_has_left_is_not_a_folder_in_the_way(folders, monkeypatch):
    def has_left(_):
        raise BrokenPipeError

    monkeypatch.setattr("gtpo_megatron.cli.study._say", has_left)
    with pytest.raises(BrokenPipeError):  # which the command's ``main`` takes for what it is
        dispatch.run(["study", *folders, "--table-only", "--num-steps", "4"])


def test_a_table_of_any_number_of_seeds_takes_no_longer(folders, monkeypatch):
    monkeypatch.setattr("gtpo_megatron.companions.study.plan.planned_runs", lambda *_, **__: pytest.fail("planned"))
    assert dispatch.run(["study", *folders, "--table-only", "--num-steps", "4", "--num-seeds", "100000"]) == 0


def test_there_is_no_negative_number_of_seeds(capsys):
    with pytest.raises(SystemExit, match="2"):
        dispatch.run(["study", "--num-seeds", "-3"])
    assert "num_seeds=-3: must be at least 1, or 0 for" in capsys.readouterr().err


def test_two_sessions_do_not_train_in_one_folder(folders, tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
         "print('held', flush=True); sys.stdin.read()", str(tmp_path / "runs" / SESSION_LOCK)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with holder:
        assert holder.stdout.readline() == "held\n"
        asked = ["study", *folders, "--num-steps", "4", "--num-seeds", "2", "--arms", "gtpo", "grpo"]
        assert dispatch.run(asked) == 2
        assert "another session trains there" in " ".join(capsys.readouterr().err.split())
        assert dispatch.run([*asked, "--table-only"]) == 0
        holder.stdin.close()
        holder.wait()
        assert dispatch.run(asked) == 0


def test_there_is_no_negative_time(capsys):
    with pytest.raises(SystemExit, match="2"):
        dispatch.run(["study", "--minutes", "-5"])
    assert "minutes=-5.0: must be at least 0" in capsys.readouterr().err


def test_side_by_side_needs_one_at_least(capsys):
    with pytest.raises(SystemExit, match="2"):
        dispatch.run(["study", "--side-by-side", "0"])
    assert "side_by_side=0: must be at least 1" in capsys.readouterr().err


def test_summaries_of_other_settings_are_refused(folders, capsys):
    assert dispatch.run(["study", *folders, "--num-steps", "5", "--num-seeds", "1", "--arms", "gtpo"]) == 2
    assert "other settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("recipes.study", "module:function"),
        ("recipes.nothing:study", "no module 'recipes.nothing'"),
        (
            "recipes.study:nothing",
            "recipes.study lacks it; it has adapter_rates, adapters, conversation_means, conversations, difficulty",
        ),
        ("recipes.tiny_cpu:gtpo", "RunConfig"),
    ],
)
def test_a_study_that_is_none(name, match):
    with pytest.raises(ConfigError, match=match):
        load_study(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "said", "status"),
    [
        (signal.SIGINT, "interrupted; the same command goes on", 130),
        (signal.SIGTERM, "interrupted by SIGTERM; the same command goes on", 75),
        (signal.SIGHUP, "interrupted by SIGHUP; the same command goes on", 75),
    ],
)
def test_a_signal_has_the_runs_saved_and_leaves_the_table(folders, tmp_path, capsys, monkeypatch, number, said, status):
    abandoned = []

    class Training:
        def __init__(self, *_, **__): ...

        def __call__(self, _):
            os.kill(os.getpid(), number)
            return True

        def abandon(self):
            abandoned.append(True)

    monkeypatch.setattr(session, "ProcessTrainer", Training)
    arguments = ["study", *folders, "--num-steps", "4", "--num-seeds", "3", "--arms", "gtpo", "grpo"]
    assert dispatch.run(arguments) == status
    out = capsys.readouterr().out
    assert "are saved first" in out
    assert said in out
    assert abandoned == [True]
    assert (tmp_path / "out" / "table.md").exists()
