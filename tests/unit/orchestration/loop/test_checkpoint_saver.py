"""A checkpoint gets its name when every rank is done, not before, and a failed one is told at the next step."""

import contextlib
import threading
import time

import pytest

from gtpo_megatron.config.output import CheckpointConfig
from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.orchestration.loop.checkpoint_saver import CheckpointSaver
from gtpo_megatron.run_folder.checkpoints import CheckpointFolder
from gtpo_megatron.weights.megatron.checkpoint_files import file_checksum
from tests.unit.orchestration.checkpoints import METRIC, facts, names, state


class Ranks:
    """One rank whose disk is as slow as the test wants, with its checkpoint."""

    def __init__(self):
        self.is_done = False
        self.error = None
        self.shard = None
        self.loaded = None
        self.in_background = None
        self.checkpoint = self

    def run_on_all(self, stage, function):
        return [function(self)]

    def begin(self, folder, *, in_background):
        assert self.shard is None, "two at a time"
        self.in_background = in_background
        self.shard = folder / "__0_0.distcp"
        self.shard.write_bytes(b"weights")

    def is_written(self):
        return self.is_done

    def finish(self):
        shard, self.shard = self.shard, None
        if self.error:
            raise self.error
        return {shard.name: file_checksum(shard)}

    def load(self, folder, *, checksums):
        self.loaded = checksums


@pytest.fixture
def ranks():
    return Ranks()


def saver(tmp_path, ranks, **config):
    return CheckpointSaver(CheckpointConfig(**config), CheckpointFolder(tmp_path), facts(), ranks)


def next_steps(checkpoints):
    """Step boundaries until nothing is on its way that can go on without waiting for ranks."""
    deadline = time.monotonic() + 10
    checkpoints.poll()
    while checkpoints._naming is not None and time.monotonic() < deadline:
        checkpoints.poll()


def test_in_the_background_the_name_comes_when_the_ranks_are_done(tmp_path, ranks):
    folder = CheckpointFolder(tmp_path)
    with saver(tmp_path, ranks) as checkpoints:
        checkpoints.save(state(1), {})
        assert ranks.in_background
        checkpoints.poll()
        assert folder.latest() is None
        ranks.is_done = True
        next_steps(checkpoints)
        assert folder.latest().state == state(1)
        ranks.is_done = False
        checkpoints.save(state(2), {})
        checkpoints.save(state(3), {})  # waits for the one before
        assert folder.latest().state == state(2)
    assert folder.latest().state == state(3), "a good end waits for the last"


def test_a_bad_end_names_nothing(tmp_path, ranks):
    checkpoints = saver(tmp_path, ranks)
    with contextlib.suppress(KeyboardInterrupt), checkpoints:
        checkpoints.save(state(1), {})
        ranks.is_done = True
        raise KeyboardInterrupt
    assert CheckpointFolder(tmp_path).latest() is None


def test_a_failed_write_is_told_at_the_next_step_and_the_last_good_one_stays(tmp_path, ranks):
    ranks.is_done = True
    checkpoints = saver(tmp_path, ranks)
    checkpoints.save(state(1), {})
    next_steps(checkpoints)
    ranks.error = CheckpointError("rank 1: No space left on device")
    checkpoints.save(state(2), {})
    with pytest.raises(CheckpointError, match="rank 1: No space left"):
        checkpoints.poll()
    assert CheckpointFolder(tmp_path).latest().state == state(1)


def test_a_step_does_not_wait_for_the_disk_to_name_and_drop_and_trouble_there_is_told_too(tmp_path, ranks):
    ranks.is_done = True
    checkpoints = saver(tmp_path, ranks)
    slow_disk, finish = threading.Event(), checkpoints._folder.finish

    def finish_slowly(*args, **kwargs):
        slow_disk.wait(10)
        finish(*args, **kwargs)
        raise CheckpointError("the disk is gone")

    checkpoints._folder.finish = finish_slowly
    checkpoints.save(state(1), {})
    checkpoints.poll()
    checkpoints.poll()
    assert CheckpointFolder(tmp_path).latest() is None
    slow_disk.set()
    with pytest.raises(CheckpointError, match="the disk is gone"):
        next_steps(checkpoints)


def test_what_the_ranks_have_written_gets_its_name_at_a_bad_end_too(tmp_path, ranks):
    ranks.is_done = True
    checkpoints = saver(tmp_path, ranks)
    with contextlib.suppress(KeyboardInterrupt), checkpoints:
        checkpoints.save(state(1), {})
        checkpoints.poll()
        raise KeyboardInterrupt
    assert CheckpointFolder(tmp_path).latest().state == state(1)


def test_waiting_for_the_disk(tmp_path, ranks):
    checkpoints = saver(tmp_path, ranks, async_save=False)
    checkpoints.save(state(1), {})
    assert not ranks.in_background
    assert CheckpointFolder(tmp_path).latest().state == state(1)


def test_the_state_is_that_of_the_save_not_of_the_end_of_the_write(tmp_path, ranks):
    checkpoints = saver(tmp_path, ranks, keep=1, keep_best=1)
    checkpoints.save(state(1), {METRIC: 0.75})
    checkpoints.save(state(2), {METRIC: 0.5})
    checkpoints.finish()
    assert names(CheckpointFolder(tmp_path)) == ["step_1", "step_2"]
    assert (tmp_path / "best").read_text() == "step_1\n"


def test_a_metric_that_is_not_measured_costs_no_checkpoint(tmp_path, ranks, caplog):
    checkpoints = saver(tmp_path, ranks, keep=1, keep_best=1, best_metric="eval/heldout_maj_at_k")
    checkpoints.save(state(1), {METRIC: 0.5})
    assert "best_metric='eval/heldout_maj_at_k' is none of its measurements, eval/heldout_mean_at_k" in caplog.text
    caplog.clear()
    checkpoints.save(state(2), {})  # a step that was not measured is saved all the same
    checkpoints.finish()
    assert "counts for no" not in caplog.text
    assert names(CheckpointFolder(tmp_path)) == ["step_2"]


@pytest.mark.parametrize(("verify", "is_checked"), [("full", True), ("sizes", False)])
def test_checksums_are_compared_where_asked_for(tmp_path, ranks, verify, is_checked):
    checkpoints = saver(tmp_path, ranks, verify=verify)
    checkpoints.save(state(1), {})
    checkpoints.finish()
    checkpoints.restore(CheckpointFolder(tmp_path).latest(verify))
    assert ("__0_0.distcp" in ranks.loaded) == is_checked
