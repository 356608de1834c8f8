"""World size, layout, paths and time are judged before anything is submitted."""

import dataclasses
import errno
import fcntl
import functools
import json
import os
from pathlib import Path

import pytest

from gtpo_megatron.cli.recipe import parse
from gtpo_megatron.errors import ConfigError
from launchers.checks import check_job, check_world
from launchers.job_folder import container_image, job_folder, mounts, settings
from launchers.options import SlurmOptions
from launchers.slurm import PROGRAM
from recipes.tiny_cpu import ASSETS
from tests.unit.launchers.jobs import ANYWHERE, big_options, tiny_options

REPOSITORY = Path(__file__).resolve().parents[3]
APART = ["--rollout.placement", "disaggregated", "--weight-sync.transport", "process_group"]


def check(options):
    return check_job(job_folder(options, submission="test"), options)


def test_two_nodes_without_gpus(tmp_path):
    checked = check(tiny_options(run_dir=tmp_path / "run"))
    assert [node.host for node in checked.placement.ranks] == ["node 0", "node 1"]
    assert any("how long a step takes is not known yet" in remark for remark in checked.remarks)
    assert not (tmp_path / "run").exists(), "a check leaves nothing behind"


def test_the_papers_64_gpus(tmp_path):
    checked = check(big_options("--dry-run", run_dir=tmp_path))
    hosts = [node.host for node in checked.placement.ranks]
    assert hosts == [f"node {rank // 8}" for rank in range(64)]
    assert [node.host for (node,) in checked.placement.engines] == hosts[::4], "engines are on the ranks' GPUs"
    assert 10 < checked.memory.step_s < 1000
    assert "TP4 PP4 DP4" in checked.memory.text
    assert ["name of the hub" in remark for remark in checked.remarks] == [True]


NODES = {
    "qwen2_5_7b:grpo_8gpu": 1,
    "qwen3_30b_a3b:gtpo_32gpu": 4,
    "deepseek_v3:gtpo_256gpu": 32,
}
MORE_NODES = {
    "llama3_1_8b:dapo_16gpu": 2,
    "r1_distill_qwen_7b:grpo_s_16k_32gpu": 4,
    "qwen3_32b:gtpo_16k_64gpu": 8,
    "qwen2_5_72b:gtpo_128gpu": 16,
    "qwen2_5_32b:dapo_published_128gpu": 16,
    "qwen3_235b_a22b:gtpo_128gpu": 16,
    "moonlight_16b_a3b:gtpo_16gpu": 2,
    "gpt_oss_20b:gtpo_8gpu": 1,
    "gpt_oss_120b:gtpo_64gpu": 8,
    "qwen3_next_80b_a3b:gtpo_64gpu": 8,
}


@pytest.mark.parametrize(
    ("recipe", "nodes"),
    [*NODES.items(), *(pytest.param(*one, marks=pytest.mark.nightly) for one in MORE_NODES.items())],
)
def test_a_recipe_fits_the_nodes_of_its_name(tmp_path, recipe, nodes):
    arguments = [*f"recipes.{recipe}".split(), *ANYWHERE, "--dry-run", "--stop-before-s", "5400", "--time", "1-0"]
    options = parse("", SlurmOptions, [*arguments, "--nodes", str(nodes), "--run-dir", str(tmp_path)], program=PROGRAM)
    checked = check(options)
    assert len(checked.placement.ranks) == 8 * nodes
    assert {node.host for nodes in checked.placement.engines for node in nodes} == {
        f"node {index}" for index in range(nodes)
    }


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--nodes", "7"], r"are 56 GPUs; num_ranks=64.* 16 engine\(s\) of 4 need 64, which both share"),
        (["--nodes", "10"], r"--nodes 10: 2 would be empty"),
        (["--gpus-per-node", "6", "--nodes", "12"], "tensor_parallel_size=4 does not divide --gpus-per-node 6"),
        (["--gpus-per-node", "2", "--nodes", "32"], "tensor_parallel_size=4 exceeds --gpus-per-node 2"),
    ],
)
def test_gpus_that_do_not_match_the_layout(overrides, message):
    with pytest.raises(ConfigError, match=message):
        check_world(big_options(*overrides))


def test_engines_on_gpus_of_their_own_need_more():
    apart = [*APART, "--rollout.num-engines", "2"]
    with pytest.raises(ConfigError, match="need 72; or 64 that both share: --rollout.placement colocated"):
        check_world(big_options(*apart))
    placement = check_world(big_options(*apart, "--nodes", "9"))
    assert [node.host for (node,) in placement.engines] == ["node 8", "node 8"]


@pytest.mark.parametrize("apart", [[], [*APART, "--rollout.num-engines", "1"]])
def test_gpus_of_the_last_node_that_nobody_uses_are_planned_as_such(tmp_path, apart):
    smaller = [
        *("--parallel.num-ranks", "60", "--parallel.pipeline-parallel-size", "1", "--rollout.num-engines", "15"),
        *("--parallel.tensor-parallel-size", "4", "--model.path", "Qwen/Qwen2.5-7B", "--dry-run"),
        *("--stop-before-s", "3600"),  # one engine measures for long
    ]
    checked = check(big_options(*smaller, *apart, run_dir=tmp_path))
    own, whole = ("60 GPUs train, 4 generate", "1 vLLM") if apart else ("every GPU generates and trains", "15 vLLM")
    assert own in checked.memory.text
    assert f"{whole} engine(s) of 4 GPU(s)" in checked.memory.text


@pytest.mark.parametrize("heldout", ["instructions?size=30", "reasoning-gym:chain_sum?size=200&seed=1"])
def test_held_out_sets_that_a_program_writes_are_taken(tmp_path, heldout):
    options = big_options("--dry-run", "--evaluation.path", heldout, run_dir=tmp_path)
    checked = check(options)
    assert checked.memory.evaluation_s["heldout"] > 0
    assert not any("how many problems" in remark for remark in checked.remarks)


def test_a_set_of_unknown_size_is_a_remark(tmp_path):
    options = big_options("--dry-run", "--evaluation.path", "hub:somebody/problems", run_dir=tmp_path)
    assert any("how many problems heldout has is not known" in remark for remark in check(options).remarks)


@pytest.mark.parametrize("option", ["--evaluation.benchmarks", "--data.train-path"])
def test_a_name_of_no_data_set_is_refused_before_submission(tmp_path, option):
    with pytest.raises(ConfigError, match="unknown data set 'aime42'; perhaps you meant"):
        check(tiny_options(option, "aime42", run_dir=tmp_path))


def test_a_node_too_many_without_gpus():
    with pytest.raises(ConfigError, match=r"--nodes 3: 1 would be empty.*take --nodes 2 or more ranks"):
        check_world(tiny_options("--nodes", "3"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--gpu-memory-gib", "40"], r"TP4 PP4 DP4 does not fit: .*GiB too much"),
        (["--stop-before-s", "20"], r"shorter than a step, \d+ s \(estimate of gtpo-megatron plan\)"),
        (["--time", "5"], "is 300 s"),
        (
            ["--stop-before-s", "300"],
            r"one held-out set takes to measure, olympiadbench \d+ s \(1.7 times the estimate",
        ),
        (["--time", "00:30:00"], r"--time 00:30:00 is 1800 s: a measurement on all held-out sets takes \d+ s"),
        (["--mem", "300G"], r"a node needs \d+ GiB of host memory, \d+ GiB too much"),
        (["--model.path", "nobody/knows-this"], "nobody/knows-this"),
        (
            ["--parallel.tensor-parallel-size", "16", "--parallel.pipeline-parallel-size", "4"],
            "exceeds --gpus-per-node 8",
        ),
    ],
)
def test_what_cannot_work_on_gpus(tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        check(big_options("--dry-run", *overrides, run_dir=tmp_path))


def test_shared_memory_reaches_one_node_only(tmp_path):
    split = ["--parallel.tensor-parallel-size", "1", "--parallel.pipeline-parallel-size", "2"]
    with pytest.raises(ConfigError, match=r"1 of 2 shards of the model are on other nodes than the engine \(node 0\)"):
        check(tiny_options(*split, run_dir=tmp_path))
    check(tiny_options(*split, "--weight-sync.transport", "process_group", run_dir=tmp_path))


def test_colocated_engines_are_reached_by_relay_only(tmp_path):
    for transport in ("process_group", "shared_memory"):
        with pytest.raises(ConfigError, match=f"transport='{transport}'.*use --weight-sync.transport relay"):
            check(big_options("--dry-run", "--weight-sync.transport", transport, run_dir=tmp_path))


def test_a_model_that_is_only_a_name_is_for_dry_runs(tmp_path):
    with pytest.raises(ConfigError, match=r"jobs need the folder of its weights: --model.path FOLDER"):
        check(big_options(run_dir=tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--model.path", "/nowhere/model"], r"model.path=/nowhere/model: no such file or folder here"),
        (["--data.train-path", "/nowhere/rows.jsonl"], r"data.train_path=/nowhere/rows.jsonl: no such file"),
        (["--evaluation.path", "/nowhere/rows.jsonl"], r"evaluation \(heldout\)=/nowhere/rows.jsonl: no such file"),
        (["--reference.path", "/nowhere/model", "--reference.measured"], "reference.path=/nowhere/model: no such file"),
        (["--adapter.path", "/nowhere/lora", "--adapter.rank", "8"], "adapter.path=/nowhere/lora: no such file"),
        (
            ["--reward.function", "0.5*recipes.tiny_cpu:gtpo + 0.5*/nowhere/r.py:f"],
            "reward.function=/nowhere/r.py: no such file",
        ),
        (["--reward.packages", "/nowhere/packages"], "reward.packages=/nowhere/packages: no such file"),
        (["--reward.judge.api-key-file", "/nowhere/key"], "reward.judge.api_key_file=/nowhere/key: no such file"),
        (["--environment.name", "./nowhere.py:Game"], "environment.name=nowhere.py: no such file"),
        (["--logging.sinks", "mine:Sink", "/nowhere/sink.py:Sink"], "logging.sinks=/nowhere/sink.py: no such file"),
        (["--container", "/nowhere/image.sqsh"], "--container /nowhere/image.sqsh: no such file"),
        (["--parallel.tensor-parallel-size", "2", "--nodes", "1", "--parallel.num-ranks", "6"], None),
        (["--parallel.num-ranks", "3", "--parallel.tensor-parallel-size", "3"], "tensor_parallel_size=3"),
    ],
)
def test_what_is_not_there(tmp_path, overrides, message):
    if message is None:
        check(tiny_options(*overrides, run_dir=tmp_path))
        return
    with pytest.raises(ConfigError, match=message):
        check(tiny_options(*overrides, run_dir=tmp_path))


def test_a_warm_start_has_ranks_alone(tmp_path):
    arguments = ["recipes.qwen2_5_7b:sft_8gpu", *ANYWHERE, "--dry-run", "--run-dir", str(tmp_path / "big")]
    assert len(check(parse("", SlurmOptions, arguments, program=PROGRAM)).placement.ranks) == 8
    options = functools.partial(tiny_options, run_dir=tmp_path, recipe="recipes.tiny_cpu:sft")
    checked = check(options())
    assert [node.node_id for node in checked.placement.ranks] == ["0", "1"]
    assert checked.placement.engines == ()
    assert "not planned for a warm start" in check(options("--gpus-per-node", "1")).memory.text
    for overrides, message in (
        (["--data.heldout-path", "/nowhere.jsonl"], r"data\.heldout_path=/nowhere\.jsonl: no such file"),
        (["--data.train-path", "gsm9k"], "gsm9k"),
        (["--nodes", "3"], "1 would be empty, since .* fit on 2"),
        (["--nodes", "1", "--gpus-per-node", "1"], "1 GPUs; .* need 2$"),
        (["--preflight"], "--preflight: it makes a step of a run"),
    ):
        with pytest.raises(ConfigError, match=message):
            check(options(*overrides))


def test_adapters_that_a_run_began_with_are_needed_no_more(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    options = tiny_options("--adapter.path", "/nowhere/lora", "--adapter.rank", "8", run_dir=tmp_path)
    with pytest.raises(ConfigError, match="adapter.path=/nowhere/lora"):
        check(options)
    (tmp_path / "checkpoints" / "latest").touch()
    check(options)


def test_a_run_folder_below_a_file(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"run folder {tmp_path}/file/run cannot be written: .*choose another"):
        check(tiny_options(run_dir=tmp_path / "file" / "run"))


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_run_folder_that_is_read_only(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot be written"):
        check(tiny_options(run_dir=tmp_path / "run"))


def test_a_disk_without_locks_is_seen_before_the_queue(tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ConfigError, match=rf"run folder {tmp_path}/run cannot be locked: Function not implemented"):
        check(tiny_options(run_dir=tmp_path / "run"))
    assert not list(tmp_path.iterdir()), "a check leaves nothing behind"


def test_a_run_folder_that_another_run_has_locked_is_no_disk_without_locks(tmp_path):
    """A job waits for it."""
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        check(tiny_options(run_dir=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_steps_that_were_measured_count_more_than_estimates(tmp_path):
    rows = [{"step": step, "timing/step_s": 100.0 * step} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = tiny_options("--stop-before-s", "150", run_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"shorter than a step, 200 s \(median of this run's last steps\)"):
        check(options)
    assert check(dataclasses.replace(options, stop_before_s=250)).remarks == []


def test_host_memory_that_is_enough_is_in_the_plan(tmp_path):
    text = check(big_options("--dry-run", "--mem", "1T", run_dir=tmp_path)).memory.text
    assert " GiB of 1024: " in text
    assert "object store 16" in text


def test_a_measured_evaluation_counts_more_than_an_estimate(tmp_path):
    """Shared out by responses: 960 s, of which 15/20 are the first set's."""
    sets = tmp_path / "sets"
    sets.mkdir()
    row = (ASSETS / "arithmetic" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[0]
    for name, num in (("large", 15), ("small", 5)):
        (sets / f"{name}.jsonl").write_text(f"{row}\n" * num, encoding="utf-8")
    rows = [{"step": 0, "timing/evaluation_s": 960.0}, {"step": 1, "timing/step_s": 10.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    arguments = ["--evaluation.path", "", "--evaluation.num-problems", "0", "--evaluation.benchmarks"]
    arguments += [f"large={sets}/large.jsonl", f"small={sets}/small.jsonl"]
    options = tiny_options(*arguments, "--stop-before-s", "700", run_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"measure, large 720 s \(this run's longest measurement\)"):
        check(options)
    check(dataclasses.replace(options, stop_before_s=721))
    with pytest.raises(ConfigError, match="--time 20 is 1200 s: a measurement on all held-out sets takes 960 s"):
        check(dataclasses.replace(options, stop_before_s=721, time="20"))


ALGORITHM = """
from gtpo_megatron.config.algorithm import GRPOConfig
from gtpo_megatron.config.configuration import configuration

@configuration
class MineConfig(GRPOConfig):
    '''Like GRPO.'''
"""


def in_container(tmp_path, *overrides):
    options = tiny_options("--container", "registry.example/gtpo:1", *overrides, run_dir=tmp_path / "run")
    return options, job_folder(options, submission="s")


def test_an_image_file_is_named_by_its_whole_path(tmp_path, monkeypatch):
    """pyxis would look for ``gtpo.sqsh`` in a registry."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gtpo.sqsh").touch()
    options = tiny_options("--container", "gtpo.sqsh", run_dir=tmp_path / "run")
    check(options)
    assert container_image(options) == f"{tmp_path}/gtpo.sqsh"
    assert f"IMAGE={tmp_path}/gtpo.sqsh\n" in settings(job_folder(options, submission="s"), options)
    options, _ = in_container(tmp_path)
    assert container_image(options) == "registry.example/gtpo:1"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["my dir", "a,b", "a:b"])
def test_a_folder_that_cannot_be_mounted_is_named(tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    options, _ = in_container(tmp_path)
    with pytest.raises(ConfigError, match=f"/{name}' must be seen inside the container, and srun takes no blanks"):
        check(options)
    check(tiny_options(run_dir=tmp_path / "run"))  # outside of a container it may have any name


def test_what_files_are_links_to_is_mounted_too(tmp_path):
    """The hub's cache: ``snapshots/REVISION/config.json -> ../../blobs/HASH``; and a data file that is a link twice."""
    cache, data = tmp_path / "cache", tmp_path / "data"
    blobs, snapshot = cache / "blobs", cache / "snapshots" / "abc"
    for folder in (blobs, snapshot, data / "links", data / "more", data / "rows"):
        folder.mkdir(parents=True)
    (blobs / "hash").touch()
    (snapshot / "config.json").symlink_to("../../blobs/hash")
    (data / "rows" / "train.jsonl").touch()
    (data / "more" / "train.jsonl").symlink_to(data / "rows" / "train.jsonl")
    (data / "links" / "train.jsonl").symlink_to(data / "more" / "train.jsonl")
    arguments = ["--model.path", str(snapshot), "--data.train-path", str(data / "links" / "train.jsonl")]
    options, job = in_container(tmp_path, *arguments)
    found = {mount.partition(":")[0] for mount in mounts(job, options)}
    assert found >= {str(path) for path in (blobs, snapshot, data / "links", data / "more", data / "rows")}
    assert str(tmp_path) not in found


def test_code_and_models_that_a_configuration_names_are_mounted_too(tmp_path, monkeypatch):
    """The submission's own folder is, so they are elsewhere; a relative path is from where one stands."""
    names = ("mine/reward", "mine/sink", "mine/game", "algorithms", "lora", "stand")
    for folder in (tmp_path / name for name in names):
        folder.mkdir(parents=True)
        (folder / "code.py").write_text(ALGORITHM if folder.name == "algorithms" else "", encoding="utf-8")
    monkeypatch.chdir(tmp_path / "stand")
    arguments = ["--algorithm", f"{tmp_path}/algorithms/code.py:MineConfig"]
    arguments += ["--logging.sinks", "../mine/sink/code.py:Sink", "--adapter.rank", "8", "--adapter.path", "../lora"]
    options, job = in_container(tmp_path, *arguments, "--environment.name", f"{tmp_path}/mine/game/code.py:Game")
    found = {mount.partition(":")[0] for mount in mounts(job, options)}
    assert found >= {str(tmp_path / name) for name in names if name != "mine/reward"}
    options, job = in_container(tmp_path, "--reward.function", f"{tmp_path}/mine/reward/code.py:right")
    assert f"{tmp_path}/mine/reward" in {mount.partition(":")[0] for mount in mounts(job, options)}
