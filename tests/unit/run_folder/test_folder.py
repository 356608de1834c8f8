"""A run folder belongs to one configuration and one process."""

import dataclasses
import errno
import fcntl
import json
import multiprocessing
import os

import pytest

from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.config.serialize import load_config
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.run_folder.folder import DataContent, RunFolder, read_contents
from recipes import qwen2_5_7b, tiny_cpu


@pytest.fixture
def folder(tmp_path):
    opened = RunFolder(tmp_path / "run")
    opened.open(tiny_cpu.gtpo(), resume=False)
    yield opened
    opened.close()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_said_with_what_helps(tmp_path, monkeypatch, number):
    def flock(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    said = rf"run folder {tmp_path}/run cannot be locked: {os.strerror(number)}; .*another on a file system with locks"
    with pytest.raises(ConfigError, match=said):
        RunFolder(tmp_path / "run").open(tiny_cpu.gtpo(), resume=False)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_the_configuration_is_written_whole(folder):
    assert load_config(folder.config_file) == tiny_cpu.gtpo()


def rows(folder, *steps):
    text = "".join(json.dumps({"step": step}) + "\n" for step in steps)
    (folder.path / "metrics.jsonl").write_text(text, encoding="utf-8")


def test_a_folder_with_a_run_needs_resume(folder):
    rows(folder, 0, 1)
    with pytest.raises(ConfigError, match="holds a run already; add --resume"):
        folder.open(tiny_cpu.gtpo(), resume=False)
    folder.open(tiny_cpu.gtpo(), resume=True)


@pytest.mark.parametrize("steps", [None, (0,)])
def test_a_run_whose_start_failed_gives_way_to_the_corrected_command(folder, steps):
    folder.record_run(tiny_cpu.gtpo(), contents(train="a"), goes_on=False)
    if steps is not None:
        rows(folder, *steps)  # measured, and failed before its first step was over
    (folder.path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="seed: 0 -> 3; .*or leave out --resume: it has not finished a step"):
        folder.open(tiny_cpu.gtpo(seed=3), resume=True)
    folder.open(tiny_cpu.gtpo(seed=3), resume=False)
    assert load_config(folder.config_file).seed == 3


@pytest.mark.parametrize("left", ["step_2", "checkpoint_pointer"])
def test_what_a_run_has_saved_is_never_begun_anew(folder, left):
    (folder.path / "checkpoints").mkdir()
    (folder.path / "checkpoints" / left).touch()
    with pytest.raises(ConfigError, match="holds a run already"):
        folder.open(tiny_cpu.gtpo(), resume=False)


def test_metrics_that_cannot_be_read_are_not_begun_anew(folder):
    (folder.path / "metrics.jsonl").write_text("no JSON\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds a run already"):
        folder.open(tiny_cpu.gtpo(), resume=False)


def test_another_configuration_is_refused_and_the_old_one_kept(folder):
    with pytest.raises(ConfigError, match="another configuration: seed: 0 -> 3"):
        folder.open(tiny_cpu.gtpo(seed=3), resume=True)
    assert load_config(folder.config_file).seed == 0


def contents(**digits):
    return {
        name.replace("_", "/"): DataContent(origin=f"/data/{name}.jsonl", problems=3, problems_sha256=digit * 64)
        for name, digit in digits.items()
    }


def test_a_run_that_goes_on_is_measured_on_the_problems_that_it_was_measured_on(folder):
    folder.record_run(tiny_cpu.gtpo(), contents(train="a", eval_heldout="b"), goes_on=False)
    assert read_contents(folder.path) == contents(train="a", eval_heldout="b")
    folder.record_run(tiny_cpu.gtpo(), contents(train="a", eval_heldout="b"), goes_on=True)
    other = contents(train="a", eval_heldout="d")
    with pytest.raises(
        ConfigError,
        match=r"eval/heldout was /data/eval_heldout.jsonl with problems b{16}, is now .* d{16}; .*remove .*data",
    ):
        folder.record_run(tiny_cpu.gtpo(num_steps=60), other, goes_on=True)
    assert load_config(folder.config_file).num_steps == 40
    assert read_contents(folder.path) == contents(train="a", eval_heldout="b")
    (folder.path / "data.json").unlink()  # it is meant, or the run is of an older version
    folder.record_run(tiny_cpu.gtpo(), other, goes_on=True)
    assert read_contents(folder.path) == other


def test_what_nothing_was_measured_on_may_change(folder):
    folder.record_run(tiny_cpu.gtpo(), contents(train="a", eval_heldout="b"), goes_on=False)
    folder.record_run(tiny_cpu.gtpo(), contents(train="c", eval_heldout="d"), goes_on=False)
    assert read_contents(folder.path) == contents(train="c", eval_heldout="d")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\x00random",
        b"[]",
        b"3",
        b'{"train": 3}',
        b'{"train": {"origin": "x"}}',
        b'{"train": {"problems": []}}',
    ],
)
def test_a_damaged_record_of_data_does_not_switch_its_check_off(folder, text):
    (folder.path / "data.json").write_bytes(text)
    with pytest.raises(ConfigError, match=r"data\.json: .*bring it back, or remove it"):
        folder.record_run(tiny_cpu.gtpo(), contents(train="a"), goes_on=True)
    assert (folder.path / "data.json").read_bytes() == text
    (folder.path / "data.json").unlink()
    folder.record_run(tiny_cpu.gtpo(), contents(train="a"), goes_on=True)
    assert read_contents(folder.path) == contents(train="a")


def test_a_longer_run_goes_on(folder):
    folder.open(tiny_cpu.gtpo(num_steps=80), resume=True)
    assert load_config(folder.config_file).num_steps == 40
    folder.record_run(tiny_cpu.gtpo(num_steps=80), {}, goes_on=True)
    assert load_config(folder.config_file).num_steps == 80


def test_a_longer_run_with_a_decaying_rate_is_another_run(tmp_path):
    config = tiny_cpu.gtpo()
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, schedule="cosine"))
    folder = RunFolder(tmp_path / "run")
    folder.open(config, resume=False)
    with pytest.raises(ConfigError, match="num_steps: 40 -> 80.*learning rate would jump"):
        folder.open(dataclasses.replace(config, num_steps=80), resume=True)
    folder.close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be written"):
        RunFolder(tmp_path / "file" / "run").open(tiny_cpu.gtpo(), resume=False)


def test_a_folder_in_use_is_refused(folder):
    with pytest.raises(ConfigError, match="in use by another process"):
        RunFolder(folder.path).open(tiny_cpu.gtpo(), resume=True)


def test_a_forked_child_does_not_hold_the_folder(tmp_path):
    """A writer of a checkpoint may live longer than its run."""
    first = RunFolder(tmp_path)
    first.open(tiny_cpu.gtpo(), resume=False)
    context = multiprocessing.get_context("fork")
    up, leave = context.Event(), context.Event()

    def outlive():
        up.set()
        leave.wait(30)

    child = context.Process(target=outlive)
    child.start()
    assert up.wait(30)
    first.close()
    second = RunFolder(tmp_path)
    second.open(tiny_cpu.gtpo(), resume=True)
    second.close()
    leave.set()
    child.join()


def test_a_colocated_run_goes_on_with_half_of_its_gpus(tmp_path):
    """Engines share the ranks' GPUs, so that fewer ranks have room for fewer engines."""
    config = qwen2_5_7b.gtpo_8gpu()
    folder = RunFolder(tmp_path / "run")
    folder.open(config, resume=False)
    assert folder.other_sums == []
    half = dataclasses.replace(
        config,
        parallel=dataclasses.replace(config.parallel, num_ranks=config.parallel.num_ranks // 2),
        rollout=dataclasses.replace(config.rollout, num_engines=config.rollout.num_engines // 2),
    )
    folder.open(half, resume=True)
    [said] = folder.other_sums
    assert said == f"rollout.num_engines: {config.rollout.num_engines} -> {half.rollout.num_engines}"
    folder.close()


MEMORY_REMEDIES = {
    "rollout": {"num_engines": 3, "kv_cache_mib": 100, "max_concurrent_sequences": 7, "tensor_parallel_size": 2},
    "model": {"recompute": "full", "head_chunk_tokens": 64},
    "update": {"micro_batch_tokens": 512},
    "cluster": {"threads_per_rank": 3, "engine_threads": 2},
}


def changed(config, section, **fields):
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **fields)})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "name", "value"),
    [(section, name, value) for section, fields in MEMORY_REMEDIES.items() for name, value in fields.items()],
)
def test_what_takes_less_memory_may_change_and_is_said(folder, section, name, value):
    folder.open(changed(tiny_cpu.gtpo(), section, **{name: value}), resume=True)
    [said] = folder.other_sums
    assert said.startswith(f"{section}.{name}: ")
    assert said.endswith(f"-> {value!r}")


@pytest.mark.parametrize(("name", "value"), [("transport", "process_group"), ("bucket_mib", 1), ("deadline_s", 7.0)])
def test_how_weights_travel_changes_nothing(folder, name, value):
    folder.open(changed(tiny_cpu.gtpo(), "weight_sync", **{name: value}), resume=True)
    assert folder.other_sums == []


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [("reward", "num_workers", 3), ("environment", "num_workers", 8), ("rollout", "max_engine_restarts", 9)],
)
def test_how_many_processes_there_are_or_may_die_changes_nothing(folder, section, name, value):
    folder.open(changed(tiny_cpu.gtpo(), section, **{name: value}), resume=True)
    assert folder.other_sums == []


def test_grading_without_limits_is_another_run(folder, tmp_path):
    """Responses whose grading takes too long have no verdict; without processes they have one."""
    with_limits, without = tiny_cpu.gtpo(), changed(tiny_cpu.gtpo(), "reward", num_workers=0)
    with pytest.raises(ConfigError, match=r"another configuration: reward\.num_workers: 1 -> 0"):
        folder.open(without, resume=True)
    other = RunFolder(tmp_path / "without")
    other.open(without, resume=False)
    with pytest.raises(ConfigError, match=r"another configuration: reward\.num_workers: 0 -> 1"):
        other.open(with_limits, resume=True)


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [("rollout", "group_size", 4), ("rollout", "dtype", "bfloat16"), ("update", "updates_per_rollout", 2)],
)
def test_what_changes_the_algorithm_may_not(folder, section, name, value):
    with pytest.raises(ConfigError, match=f"another configuration: {section}.{name}: "):
        folder.open(changed(tiny_cpu.gtpo(), section, **{name: value}), resume=True)


def test_another_layout_is_the_same_run_but_another_form_of_the_optimizer_is_not(folder):
    config = tiny_cpu.gtpo()
    other = dataclasses.replace(config, parallel=ParallelConfig(num_ranks=1))
    folder.open(other, resume=True)
    folder.record_run(other, {}, goes_on=True)
    assert load_config(folder.config_file).parallel.num_ranks == 1
    sharded = ParallelConfig(num_ranks=2, tensor_parallel_size=2, distributed_optimizer=True)
    with pytest.raises(ConfigError, match="parallel.distributed_optimizer: False -> True"):
        folder.open(dataclasses.replace(config, parallel=sharded), resume=True)
