"""Saves that go wrong: the disk is full, a writer or a rank is killed. The last good checkpoint stays, and goes on."""

import contextlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch

from gtpo_megatron.config.output import CheckpointConfig
from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.orchestration.loop.checkpoint_saver import CheckpointSaver
from gtpo_megatron.run_folder.checkpoints import CheckpointFolder, DriverState
from tests.dist_utils import run_processes, start_process
from tests.distributed.test_actor_checkpoint import one_step, parameters, start
from tests.distributed.tiny_world import make_config, make_model
from tests.unit.orchestration.checkpoints import facts, names

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),  # Megatron and torch's checkpoint warn of deprecations of their own
]

NUM_STEPS = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, tied=False)
    return folder


class World:
    """All ranks as the driver has them, seen from any of them: calls go out in step, answers come back together."""

    def __init__(self, actor):
        self._actor = actor

    def run_on_all(self, stage, function):
        return gather(function(self._actor))


class FirstRankFolder(CheckpointFolder):
    """Rank 0 is the driver; the others hear what it did."""

    def begin(self, step):
        return Path(first_rank(lambda: str(super(FirstRankFolder, self).begin(step))))

    def finish(self, scratch, state, **arguments):
        """In a thread, so without the others."""
        if torch.distributed.get_rank() == 0:
            super().finish(scratch, state, **arguments)


def gather(value):
    found = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return found


def first_rank(action):
    return gather(action() if torch.distributed.get_rank() == 0 else None)[0]


def saver(actor, path, **config):
    return CheckpointSaver(CheckpointConfig(**config), FirstRankFolder(path), facts(), World(actor))


def state(step):
    return DriverState(step=step, sampler={}, counters={}, mismatch={"samples": []})


def save_and_go_on(checkpoints, *, steps):
    """Each step's save, then step boundaries until it is written or has failed."""
    for step in steps:
        checkpoints.save(state(step), {})
        while checkpoints._pending is not None or checkpoints._naming is not None:
            checkpoints.poll()


@contextlib.contextmanager
def full_disk():
    """A file system of two checkpoints' size, where mounting is allowed."""
    with tempfile.TemporaryDirectory() as folder:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=640k", "tmpfs", folder], check=False, capture_output=True
        )
        if mounted.returncode:
            pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


@contextlib.contextmanager
def no_large_files():
    """The kernel refuses to write past a size, as a quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("async_save", [True, False])
def test_a_quota_that_is_hit_leaves_the_last_good_checkpoint(model, tmp_path, async_save):
    config = make_config(model, {"num_ranks": 2, "tensor_parallel_size": 2})

    def save(rank, world_size, init_method):
        actor = start(rank, init_method, config)
        checkpoints = saver(actor, tmp_path, async_save=async_save)
        checkpoints.save(state(1), {})
        checkpoints.finish()
        one_step(actor, config, 1)
        gather("named")
        with no_large_files(), pytest.raises(CheckpointError, match=r"rank 0: .*File too large; rank 1: .*stay valid"):
            save_and_go_on(checkpoints, steps=range(2, 3))
        assert CheckpointFolder(tmp_path).latest().state.step == 1
        checkpoints.save(state(3), {})  # there is room again
        checkpoints.finish()
        gather("named")
        assert CheckpointFolder(tmp_path).latest("full").state.step == 3

    run_processes(save, 2, timeout_s=120)
    assert names(CheckpointFolder(tmp_path)) == ["step_1", "step_3"]


def test_a_full_disk_leaves_the_last_good_checkpoint(model):
    config = make_config(model, {"num_ranks": 1})
    with full_disk() as disk:

        def save(rank, world_size, init_method):
            actor = start(rank, init_method, config)
            checkpoints = saver(actor, disk, keep=5)
            with pytest.raises(CheckpointError, match="No space left on device.*stay valid"):
                save_and_go_on(checkpoints, steps=range(1, 9))
            last = CheckpointFolder(disk).latest()
            checkpoints.restore(last)  # with all checksums
            return last.state.step

        [last] = run_processes(save, 1, timeout_s=120)
        assert last >= 1
        assert f"step_{last}" in names(CheckpointFolder(disk))


def test_a_writer_that_is_killed_is_told_and_nothing_is_named(model, tmp_path):
    config = make_config(model, {"num_ranks": 1})

    def save(rank, world_size, init_method):
        from gtpo_megatron.actor.checkpoint import writer as checkpoint_writer

        checkpoint_writer.file_checksum = lambda _: time.sleep(60)
        actor = start(rank, init_method, config)
        checkpoints = saver(actor, tmp_path)
        checkpoints.save(state(1), {})
        [writer] = psutil.Process().children()
        while writer.nice() <= psutil.Process().nice():  # it steps back before it starts
            time.sleep(0.01)
        checkpoints.poll()
        writer.kill()
        with pytest.raises(CheckpointError, match=r"rank 0: its writer died \(exit code -9\)"):
            checkpoints.finish()

    run_processes(save, 1, timeout_s=60)
    assert CheckpointFolder(tmp_path).latest() is None
    assert names(CheckpointFolder(tmp_path)) == [f".{path.name[1:]}" for path in tmp_path.glob(".step_1.*.partial")]


def test_a_rank_that_leaves_in_mid_save_takes_its_writer_along(model, tmp_path):
    config = make_config(model, {"num_ranks": 1})

    def save(rank, world_size, init_method):
        from gtpo_megatron.actor.checkpoint import writer as checkpoint_writer

        checkpoint_writer.file_checksum = lambda _: time.sleep(60)
        actor = start(rank, init_method, config)
        actor.checkpoint.begin(tmp_path, in_background=True)
        [writer] = psutil.Process().children()
        actor.close()
        return psutil.pid_exists(writer.pid)

    assert run_processes(save, 1, timeout_s=60) == [False]


# ------------------------------------------------------------------------------------------ kills at random points
def train(rank, init_method, config, folder):
    """A run of some steps that saves each one in the background and goes on from what is there."""
    torch.set_num_threads(1)
    actor = start(rank, init_method, config)
    checkpoints = saver(actor, folder / "checkpoints")
    last = CheckpointFolder(folder / "checkpoints").latest("full")
    done = 0
    if last is not None:
        checkpoints.restore(last)
        done = actor._policy_version = last.state.step
    with checkpoints:
        for step in range(done + 1, NUM_STEPS + 1):
            metrics = one_step(actor, config, step)
            if rank == 0:
                with (folder / "metrics").open("a") as file:
                    file.write(json.dumps({"step": step, **metrics}, sort_keys=True) + "\n")
            checkpoints.poll()
            checkpoints.save(state(step), {})
    torch.save(parameters(actor), folder / f"weights{rank}.pt")
    actor.close()


def launch(config, folder):
    store = tempfile.mktemp()
    return [start_process(train, rank, f"file://{store}", config, folder) for rank in range(2)]


def finished(ranks, timeout_s):
    deadline = time.monotonic() + timeout_s
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    return all(process.exitcode == 0 for process in ranks)


def moment(checkpoints, step):
    """How far a step's checkpoint is; one that is saved may never have been seen half-way on a busy machine."""
    try:
        entries = [entry.name for entry in os.scandir(checkpoints)]
        if any(int(name.removeprefix("step_")) >= step for name in entries if re.fullmatch(r"step_\d+", name)):
            return "saved"
        partial = [name for name in entries if re.fullmatch(rf"\.step_{step}\..*\.partial", name)]
        files = [entry.name for name in partial for entry in os.scandir(checkpoints / name)]
    except FileNotFoundError:  # not made yet, or named meanwhile
        return None
    return "saving" if any(name.endswith(".distcp") for name in files) else None


def kill_when(ranks, chooser, folder):
    """SIGKILL to a random rank at a random moment: in a step, or while a checkpoint is being written."""
    checkpoints = folder / "checkpoints"
    latest = CheckpointFolder(checkpoints).latest()
    first = latest.state.step if latest else 0
    step = chooser.randint(first + 1, min(first + 2, NUM_STEPS - 1))
    wants_save = chooser.random() < 0.5
    deadline = time.monotonic() + 120
    while (seen := moment(checkpoints, step)) is None or (seen == "saving" and not wants_save):
        assert all(process.is_alive() for process in ranks)
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(chooser.uniform(0, 0.05))
    os.kill(chooser.choice(ranks).pid, signal.SIGKILL)
    for process in ranks:  # which the driver does when it has seen one die
        process.kill()
        process.join()
    return step, seen


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_kills_at_random_points_change_nothing(model, tmp_path, seed):
    config = make_config(model, {"num_ranks": 2, "tensor_parallel_size": 2})
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    assert finished(launch(config, whole), 120)
    chooser = random.Random(seed)
    kills = []
    while len(kills) < 6:
        latest = CheckpointFolder(broken / "checkpoints").latest()
        if latest is not None and latest.state.step >= NUM_STEPS - 1:
            break
        kills.append(kill_when(launch(config, broken), chooser, broken))
    assert len(kills) >= 3
    assert finished(launch(config, broken), 120), kills
    rows = [json.loads(line) for line in (whole / "metrics").read_text().splitlines()]
    again = {(row["step"]): row for row in map(json.loads, (broken / "metrics").read_text().splitlines())}
    assert [again[row["step"]] for row in rows] == rows, kills
    for rank in range(2):
        left, right = (torch.load(folder / f"weights{rank}.pt") for folder in (whole, broken))
        assert all(torch.equal(left[name], right[name]) for name in left), kills
