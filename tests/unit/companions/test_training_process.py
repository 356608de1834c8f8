import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gtpo_megatron.companions.training_process import TrainingProcess
from gtpo_megatron.errors import WorkerError
from gtpo_megatron.supervision.process_tree import SHARED_MEMORY


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A process with the given Python code in the place of a training run; ended with the test."""
    started, popen = [], subprocess.Popen

    def start(code):
        monkeypatch.setattr(subprocess, "Popen", lambda _, **kwargs: popen([sys.executable, "-c", code], **kwargs))
        started.append(TrainingProcess(tmp_path / "c.yaml", tmp_path, output=tmp_path / "out", resume=False))
        return started[-1]

    yield start
    for run in started:
        run.kill()


def test_a_run_that_fails_shows_its_last_words(tmp_path, monkeypatch):
    run = TrainingProcess(tmp_path / "none.yaml", tmp_path, output=tmp_path / "out", resume=False)
    with pytest.raises(WorkerError, match=r"(?s)ended with status 2:.*none.yaml: cannot be read"):
        run.wait(lambda _: None)
    run.kill()


def test_a_kill_takes_the_children_along(tmp_path, monkeypatch):
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    code += f"open({str(tmp_path / 'up')!r}, 'w').close(); time.sleep(60)"
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **kwargs: popen([sys.executable, "-c", code], **kwargs))
    run = TrainingProcess(tmp_path / "c.yaml", tmp_path, output=tmp_path / "out", resume=False)
    run.wait(lambda _: None, until=(tmp_path / "up").exists)
    driver = psutil.Process(run._process.pid)
    children = driver.children()
    assert len(children) == 1
    run.kill()
    assert not any(child.is_running() for child in children)


def test_a_kill_leaves_nothing_that_only_the_supervisor_knows(start, tmp_path):
    up = tmp_path / "up"
    run = start(
        "import os, time; from pathlib import Path; from multiprocessing import resource_tracker; "
        "from multiprocessing.shared_memory import SharedMemory; "
        "from gtpo_megatron.orchestration.run_supervisor import RunSupervisor; "
        "supervisor = RunSupervisor(None, sweeps_driver=True); shared = SharedMemory(create=True, size=64); "
        "resource_tracker.unregister(shared._name, 'shared_memory'); time.sleep(0.5); "
        f"Path({str(up)!r} + '.new').write_text(f'{{supervisor.temp_folder}} {{shared.name}}'); "
        f"os.rename({str(up)!r} + '.new', {str(up)!r}); time.sleep(60)"
    )
    run.wait(lambda _: None, until=up.exists)
    folder, shared = up.read_text().split()
    assert Path(folder).exists()
    run.kill()
    assert not Path(folder).exists()
    assert not (SHARED_MEMORY / shared).exists()


def test_a_kill_after_the_end_ends_nothing(start, monkeypatch):
    run = start("pass")
    assert run.wait_until(float("inf")) == "finished"
    monkeypatch.setattr(psutil, "Process", lambda _: pytest.fail("its process id may be a stranger's"))
    run.kill()


def test_a_run_is_waited_for_until_it_ends_or_time_is_up(start):
    assert start("pass").wait_until(float("inf")) == "finished"
    assert start("import time; time.sleep(60)").wait_until(time.monotonic() + 0.2) == "running"
    assert start("import sys; sys.exit(75)").wait_until(float("inf")) == "stopped"
    with pytest.raises(WorkerError, match=r"(?s)ended with status 3.*last words"):
        start("import sys; print('last words'); sys.exit(3)").wait_until(float("inf"))


def test_a_run_that_is_asked_to_stop_may_end_save_or_be_too_slow(start, tmp_path):
    def asked(at_signal, within_s=20.0):
        up = tmp_path / "up"
        up.unlink(missing_ok=True)
        code = f"import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: {at_signal}); "
        run = start(code + f"open({str(up)!r}, 'w').close(); time.sleep(60)")
        run.wait(lambda _: None, until=up.exists)
        return run.stop(within_s=within_s)

    assert asked("sys.exit(0)") == "finished"
    assert asked("sys.exit(75)") == "stopped"
    assert asked("None", within_s=0.3) == "running"
    with pytest.raises(WorkerError, match="ended with status 1"):
        asked("sys.exit(1)")


def test_a_run_that_is_asked_to_stop_before_it_listens_has_not_failed(start):
    assert start("import time; time.sleep(60)").stop(within_s=20.0) == "stopped"
