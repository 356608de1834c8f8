"""How a driver's process ends after Ray has died under it."""

import subprocess
import sys

import pytest

from tests.integration.runs import LEAVINGS

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300), LEAVINGS]

DRIVER = """
import atexit, sys
import psutil, ray
from gtpo_megatron.orchestration.on_ray.cluster import leave_lost_ray

class Worker:
    def answer(self):
        return 1

ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
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
    done = subprocess.run([sys.executable, "-c", DRIVER], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr[-2000:]
    assert done.stdout == "no line feed at the endan exit handler of Python's\n"
