"""A signal to the process group: the run saves itself, whatever else of the group has ended."""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from gtpo_megatron.companions.status import read_status
from tests.integration.runs import LEAVINGS, SMALL, start_in_shell, steps

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.megatron,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    LEAVINGS,
]


def test_a_pipeline_that_is_told_to_end_as_timeout_does(tmp_path):
    """Shell and ``tee`` end at once, and the driver's output with them; Ray's agents once ended with them too."""
    folder, printed = tmp_path / "run", tmp_path / "printed"
    command = str(Path(sys.executable).with_name("gtpo-megatron"))
    options = " ".join((*SMALL, "--evaluation.every-steps 0", "--num-steps 100"))
    shell = start_in_shell(f"{command} train recipes.tiny_cpu:gtpo --run-dir {folder} {options} 2>&1 | tee {printed}")
    deadline = time.monotonic() + 400
    while not printed.exists() or "step 1/100" not in printed.read_text(encoding="utf-8"):
        assert shell.poll() is None, printed.read_text(encoding="utf-8")
        assert time.monotonic() < deadline
        time.sleep(0.05)
    everything = psutil.Process(shell.pid).children(recursive=True)
    groups = {process.pid: os.getpgid(process.pid) for process in everything}
    driver = next(process for process in everything if groups[process.pid] == shell.pid and process.children())
    assert {pid for pid, group in groups.items() if group == shell.pid} <= {driver.pid, *_of_shell(shell)}
    # in one session: Linux shares the processors among sessions first, and engines poll their workers
    computing = [process.pid for process in everything if process.name().startswith(("ray::", "VLLM::"))]
    assert len(computing) >= 3
    assert {os.getsid(pid) for pid in computing} == {os.getsid(driver.pid)}
    for _ in range(2):
        os.killpg(shell.pid, signal.SIGTERM)
        time.sleep(0.003)
    _, left = psutil.wait_procs(everything, timeout=240)
    assert left == []
    status = read_status(folder)
    assert (status.state, status.checkpoint_step) == ("stopped", steps(folder)[-1]["step"])
    assert status.step < 100
    assert "SIGTERM" in (folder / "log.txt").read_text(encoding="utf-8")


def _of_shell(shell):
    return {process.pid for process in psutil.Process(shell.pid).children()}
