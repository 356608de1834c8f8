"""A run on this machine through nemo-run, with a stand-in for the training command."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gtpo_megatron.config.serialize import load_any, load_config
from launchers import local

pytestmark = pytest.mark.timeout(240)  # nemo-run is imported, in processes of their own

REPOSITORY = Path(__file__).resolve().parents[3]

PYTHON = """\
#!/bin/bash
# in place of `python -m gtpo_megatron.cli train CONFIG --run-dir RUN --resume`: says what it was told, and ends
run=$6
{ pwd; printf '%s\\n' "$@"; } > "$run/told"
echo "the run speaks"
if [[ -n $UNTIL_ASKED ]]; then
  trap 'asked=1' TERM INT HUP
  touch "$run/up"
  until [[ -n $asked ]]; do sleep 0.05; done
fi
[[ -z $OUTCOME ]] || printf '{"num_starts": 1, "host": "here", "pid": 1, "started_at": %s, "outcome": "%s"}' \\
  "$(date +%s.%N)" "$OUTCOME" > "$run/run_state.json"
exit "$STATUS"
"""

LAUNCH = """
import sys
from types import SimpleNamespace
from launchers import local
local.sys = SimpleNamespace(executable=sys.argv[1], stderr=sys.stderr)
sys.exit(local.run(sys.argv[2:]))
"""


@pytest.fixture
def launch(tmp_path):
    """Starts a run from a folder of its own; the stand-in ends as it is told to."""
    python, stand = tmp_path / "python", tmp_path / "stand"
    python.write_text(PYTHON, encoding="utf-8")
    python.chmod(0o755)
    stand.mkdir()

    def start(*, status, outcome="", until_asked=""):
        return subprocess.Popen(
            [
                sys.executable,
                "-c",
                LAUNCH,
                str(python),
                "recipes.tiny_cpu:gtpo",
                "--run-dir",
                "run",
                "--num-steps",
                "3",
            ],
            cwd=stand,
            env=os.environ
            | {
                "PYTHONPATH": str(REPOSITORY),
                "STATUS": str(status),
                "OUTCOME": outcome,
                "UNTIL_ASKED": until_asked,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def whole(**told):
        """The same to its end: status and last words."""
        process = start(**told)
        _, error = process.communicate()
        return process.returncode, error

    whole.start, whole.run_dir = start, stand / "run"
    return whole


@pytest.mark.nightly
def test_a_run_that_ends_well_was_started_as_one_would_by_hand(launch):
    status, error = launch(status=0, outcome="finished")
    assert status == 0, error
    # nemo-run shows what is said as well, but need not come to it before a run that says one thing has ended
    logs = [path.read_text(encoding="utf-8") for path in (launch.run_dir / "launch").rglob("*.log")]
    assert any("the run speaks" in log for log in logs)
    cwd, *told = (launch.run_dir / "told").read_text(encoding="utf-8").splitlines()
    (config,) = (launch.run_dir / "launch").glob("local-*/config.yaml")
    assert cwd == str(launch.run_dir.parent), "paths of the recipe are relative to where one stands"
    assert told == ["-m", "gtpo_megatron.cli", "train", str(config), "--run-dir", str(launch.run_dir), "--resume"]
    assert load_config(config).num_steps == 3


@pytest.mark.nightly
def test_a_run_that_was_stopped_says_so_by_its_status(launch):
    assert launch(status=75, outcome="stopped after step 2: SIGTERM")[0] == 75


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("number", "status", "outcome", "ends_with"),
    [
        (signal.SIGINT, 75, "stopped after step 2: SIGINT", 75),
        (signal.SIGTERM, 75, "stopped after step 2: SIGTERM", 75),
        (signal.SIGTERM, 143, "", 143),
        (signal.SIGHUP, 1, "KeyboardInterrupt: SIGTERM", 129),
    ],
)
def test_a_signal_is_the_runs_and_the_launcher_waits(launch, number, status, outcome, ends_with):
    """torchx starts the run in a session of its own, where neither Ctrl-C nor ``timeout`` would reach it."""
    process = launch.start(status=status, outcome=outcome, until_asked="1")
    deadline = time.monotonic() + 120
    while not (launch.run_dir / "up").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    out, error = process.communicate(timeout=60)
    assert process.returncode == ends_with, error
    assert "Traceback" not in error
    assert ("has ended the run; the same command goes on" in out) == (ends_with != 75)


def test_ctrl_c_before_there_is_a_run_is_one_line(monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(local, "check_paths", interrupt)
    assert local.run(["recipes.tiny_cpu:gtpo"]) == 130
    assert capsys.readouterr().err == "python -m launchers.local: interrupted\n"


@pytest.mark.nightly
def test_a_run_that_fails_says_why_in_its_last_line(launch):
    """An earlier start was stopped and saved; that is not how this one ended."""
    launch.run_dir.mkdir()
    earlier = {
        "num_starts": 1,
        "host": "here",
        "pid": 1,
        "started_at": time.time() - 9,
        "outcome": "stopped after step 2",
    }
    (launch.run_dir / "run_state.json").write_text(json.dumps(earlier), encoding="utf-8")
    status, error = launch(status=1)
    assert status == 1
    assert error.splitlines()[-1].startswith("python -m launchers.local: the run failed; logs: ")
    status, error = launch(status=1, outcome="WorkerError: rank 1 died")
    assert status == 1
    last = error.splitlines()[-1]
    assert last.startswith("python -m launchers.local: the run failed: WorkerError: rank 1 died; logs: ")
    assert last.endswith(f"{launch.run_dir}/log.txt")


@pytest.mark.parametrize(("recipe", "command"), [("gtpo", "train"), ("sft", "sft")])
def test_a_dry_run_starts_nothing(tmp_path, monkeypatch, capsys, recipe, command):
    monkeypatch.setattr(local, "_run", pytest.fail)
    assert (
        local.run([f"recipes.tiny_cpu:{recipe}", "--run-dir", str(tmp_path / "run"), "--seed", "7", "--dry-run"]) == 0
    )
    folder = tmp_path / "run" / "launch" / "local-dry-run"
    assert load_any(folder / "config.yaml").seed == 7
    printed = capsys.readouterr().out
    assert f"-m gtpo_megatron.cli {command} {folder}/config.yaml --run-dir {tmp_path}/run --resume" in printed
    assert "nothing was started" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs a recipe first: python -m launchers.local recipes.tiny_cpu:gtpo"),
        (["recipes.tiny_cpu:gtpo", "--model.path", "/nowhere/model"], "model.path=/nowhere/model: no such file"),
        (["recipes.tiny_cpu:gtpo", "--run-dir", "/proc/run"], "run folder /proc/run cannot be written"),
        (["recipes.tiny_cpu:gtpo", "--parallel.tensor-parallel-size", "3", "--parallel.num-ranks", "3"], "=3"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(local, "_run", pytest.fail)
    assert local.run(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
