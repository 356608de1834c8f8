"""How a driver's process ends after Ray has died under it."""

import subprocess
import sys
import tempfile

import pytest

from tests.integration.runs import LEAVINGS

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.timeout(300), LEAVINGS]

DRIVER = """
import atexit, sys
from pathlib import Path
import psutil, ray
from gtpo_megatron.orchestration.on_ray.cluster import leave_lost_ray
from tests.integration.own_ray import start_ray

class Worker:
    def answer(self):
        return 1

start_ray(Path(sys.argv[1]))
worker = ray.remote(Worker).options(num_cpus=0).remote()
assert ray.get(worker.answer.remote()) == 1
atexit.register(print, "an exit handler of Python's")
for process in psutil.Process().children(recursive=True):
    process.kill()
leave_lost_ray()
print("no line feed at the end", end="")
sys.exit(1)
"""


@pytest.mark.parametrize("time", range(3))
def test_it_ends_with_a_status_and_not_by_a_signal(time):
    """Without ``leave_lost_ray`` it died of SIGSEGV, nearly each time, in an exit handler of Ray's library."""
    with tempfile.TemporaryDirectory(prefix="gtpo-", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-c", DRIVER, folder]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1, done.stderr[-2000:]
    assert done.stdout == "no line feed at the endan exit handler of Python's\n"
