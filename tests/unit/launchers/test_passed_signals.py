"""Requests to stop reach a run that was started in a session of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]

RUN = """
import os, signal, sys, time
heard = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, lambda number, _: heard.append(signal.Signals(number).name))
open("up", "w").close()
while len(heard) < int(sys.argv[1]):
    time.sleep(0.02)
print(*heard)
sys.exit(75)
"""

LAUNCHER = """
import os, signal, subprocess, sys, time
from launchers.passed_signals import PassedSignals
with PassedSignals() as signals:
    if sys.argv[2] == "early":
        os.kill(os.getpid(), signal.SIGTERM)
    run = subprocess.Popen([sys.executable, "-c", RUN, sys.argv[1]], start_new_session=True)
    while not os.path.exists("up"):
        time.sleep(0.02)
    signals.run_has_started()
    open("waiting", "w").close()
    status = run.wait()
print(status, signals.first.name)
"""


@pytest.fixture
def launch(tmp_path):
    """Starts a launcher whose run ends after so many signals."""

    def start(num_signals, when="later"):
        launcher = LAUNCHER.replace("RUN", repr(RUN), 1)
        process = subprocess.Popen(
            [sys.executable, "-c", launcher, str(num_signals), when],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        deadline = time.monotonic() + 60
        while not (tmp_path / "waiting").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return process

    return start


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_the_launcher_waits_for_the_run_that_it_has_asked(launch, name):
    launcher = launch(1)
    launcher.send_signal(signal.Signals[name])
    assert launcher.communicate(timeout=60)[0] == f"{name}\n75 {name}\n"


def test_every_request_is_the_runs_to_judge(launch):
    """The second one ends a run at once."""
    launcher = launch(2)
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGTERM)
    assert launcher.communicate(timeout=60)[0] == "SIGINT SIGTERM\n75 SIGINT\n"


def test_a_request_from_before_the_run_is_kept(launch):
    assert launch(1, "early").communicate(timeout=60)[0] == "SIGTERM\n75 SIGTERM\n"


def test_what_was_ignored_stays_so(launch):
    """As under ``nohup``."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launcher = launch(1)
    finally:
        signal.signal(signal.SIGHUP, before)
    launcher.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGTERM)
    assert launcher.communicate(timeout=60)[0] == "SIGTERM\n75 SIGTERM\n"
