"""How long a run waits for a Ray of its own: the real one, whose raylet is stopped or killed as it starts."""

import subprocess
import sys
import tempfile

import pytest

from tests.integration.own_ray import NUM_STARTS

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.timeout(600)]

START = """
import sys, threading, time
from pathlib import Path
import psutil
from gtpo_megatron.config.cluster import ClusterConfig
from gtpo_megatron.orchestration.on_ray.collect import Deadline
from gtpo_megatron.orchestration.on_ray.local_cluster import start_own_ray

def is_raylet(process):
    try:
        return process.name() == "raylet"
    except psutil.NoSuchProcess:
        return False

folder, deadline_s, stopped_s = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])

def strike():
    while not (found := [child for child in psutil.Process().children() if is_raylet(child)]):
        time.sleep(0.001)
    if stopped_s:
        found[0].suspend()
        time.sleep(stopped_s)
        found[0].resume()
    else:
        found[0].kill()

threading.Thread(target=strike, daemon=True).start()
began = time.monotonic()
config = ClusterConfig(num_cpus=1, object_store_mib=80)
try:
    start_own_ray(config, folder, deadline=Deadline(deadline_s), log_to_driver=False, logging_level="ERROR")
    import ray
    print(f"up with {len(ray.nodes())} node", end="")
    ray.shutdown()
except RuntimeError as error:
    print(error, end="")
print(f" after {time.monotonic() - began:.0f} s")
"""


def start(*, deadline_s, stopped_s):
    """What a start says, and how long it took; its raylet is stopped for so long, or killed if that is 0."""
    with tempfile.TemporaryDirectory(prefix="gtpo-", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-c", START, folder, str(deadline_s), str(stopped_s)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    told, _, seconds = done.stdout.rpartition(" after ")
    return told, int(seconds.split()[0])


def test_a_raylet_that_needs_longer_than_ray_waits_is_waited_for():
    # with its agents beside a busy test it ends itself
    starts = (start(deadline_s=200, stopped_s=40) for _ in range(NUM_STARTS))
    told, seconds = next((found for found in starts if "its raylet has ended" not in found[0]), ("it ended itself", 0))
    assert told == "up with 1 node"
    assert seconds >= 40


def test_the_deadline_ends_the_wait():
    told, seconds = start(deadline_s=5, stopped_s=200)
    assert "its raylet is not up within 5 s" in told
    assert 5 <= seconds < 150  # Ray is asked for 30 s at a time


def test_a_raylet_that_has_ended_is_not_waited_for():
    told, seconds = start(deadline_s=280, stopped_s=0)
    assert "its raylet has ended" in told
    assert seconds < 250


TWICE = """
import os, signal, sys, threading, time
from pathlib import Path
import psutil
from tests.integration import own_ray

def of_first_start():
    names = {}
    for process in psutil.process_iter():
        try:
            if any("/2/ray/session_" in argument and sys.argv[1] in argument for argument in process.cmdline()):
                names[process.pid] = process.name()
        except psutil.Error:
            pass
    return names

def strike():
    while True:
        names = of_first_start()
        if len(names) > 3 and "raylet" in names.values():  # GCS, raylet and some of its agents
            break
        time.sleep(0.01)
    (raylet,) = (pid for pid, name in names.items() if name == "raylet")
    os.kill(raylet, signal.SIGKILL)
    struck.append(raylet)

struck = []
threading.Thread(target=strike, daemon=True).start()
own_ray.start_ray(Path(sys.argv[1]))
import ray
print(len(struck), len(ray.nodes()), len(of_first_start()))
ray.shutdown()
"""


def test_tests_start_it_again_and_nothing_of_the_first_start_is_left():
    """Agents neither, which are nobody's children once their raylet is dead."""
    with tempfile.TemporaryDirectory(prefix="gtpo-", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-c", TWICE, folder]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=280)
    assert done.stdout == "1 1 0\n", done.stderr[-3000:]
