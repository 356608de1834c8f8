"""The wheel in an environment of its own, in an empty folder: everything of the README works without a checkout."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from gtpo_megatron.run_folder.metrics_file import read_metrics
from tests.integration.runs import LEAVINGS, SMALL
from tests.integration.wheel import PACKAGES, Installed, build_wheel, names_in, tracked_files

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600), LEAVINGS]
COMMAND = "gtpo-megatron"
WEIGHTS = "model.safetensors"
SHARE = "gtpo_megatron-0.1.0.data/data/share/gtpo_megatron/"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    return Installed(wheel, tmp_path_factory.mktemp("installed"))


def test_the_wheel_has_every_file_of_its_packages_and_nothing_else(wheel):
    ours = {name for name in tracked_files() if name.partition("/")[0] in PACKAGES}
    found = {name for name in names_in(wheel) if ".dist-info/" not in name}
    shared = {name for name in found if name.startswith(SHARE)}
    assert found - shared == ours
    to_read = {name for name in tracked_files() if name.startswith(("docs/", "examples/"))}
    assert {name.removeprefix(SHARE) for name in shared} == to_read
    assert wheel.stat().st_size < 20e6


def test_nothing_comes_from_the_checkout(installed):
    for name in PACKAGES:
        path = installed.run("python", "-c", f"import {name}; print({name}.__file__)").stdout
        assert path.startswith(str(installed.packages))


def test_a_recipe_is_planned_resolved_and_laid_out(installed):
    plan = json.loads(installed.run(COMMAND, "plan", "recipes.qwen2_5_7b:gtpo_8gpu", "--json").stdout)
    assert plan
    for recipe in ("gtpo", "moe_gtpo"):
        text = installed.run(COMMAND, "config", f"recipes.tiny_cpu:{recipe}").stdout
        assert f"path: {installed.packages}/recipes/assets/tiny_qwen" in text
    local = installed.run("python", "-m", "launchers.local", "recipes.tiny_cpu:gtpo", "--run-dir", "l", "--dry-run")
    assert "nothing was started" in local.stdout
    job = ["--account", "a", "--partition", "p", "--gpus-per-node", "0", "--cpus-per-task", "4", "--dry-run"]
    slurm = installed.run("python", "-m", "launchers.slurm", "recipes.tiny_cpu:gtpo", "--run-dir", "s", *job)
    assert "nothing was submitted" in slurm.stdout
    launch = installed.cwd / "s" / "launch" / "dry-run"
    assert {"sbatch.sh", "node.sh", "batch.sh", "node_network.py"} <= {path.name for path in launch.iterdir()}


def test_a_stranger_finds_the_examples_and_the_documentation(installed):
    said = installed.run(COMMAND, "examples", "mine").stdout
    documentation = Path(said.splitlines()[-1].removeprefix("documentation: "))
    assert documentation.is_relative_to(installed.bin.parent)
    assert (documentation.parent / "your_own_algorithm.md").is_file()
    installed.run("python", "mine/own_model/make_model.py", "my-model")
    for name in ("own_algorithm", "own_data", "own_model", "own_reward"):
        more = ["--model.path", "my-model"] if name == "own_model" else []
        text = installed.run(COMMAND, "config", f"mine/{name}/recipe.py:recipe", *more).stdout
        assert f"name: {name}" in text


def test_models_convert_there_and_back(installed):
    source = installed.packages / "recipes" / "assets" / "tiny_qwen2"
    installed.run(COMMAND, "convert", "hf-to-megatron", str(source), "megatron")
    assert "back is written" in installed.run(COMMAND, "convert", "megatron-to-hf", "megatron", "back").stderr
    assert load_file(installed.cwd / "back" / WEIGHTS).keys() == load_file(source / WEIGHTS).keys()


@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.megatron
def test_the_quickstart_runs_in_an_empty_folder(installed):
    said = installed.run(COMMAND, "quickstart", "--num-steps", "2", *SMALL).stdout
    assert "report: runs/quickstart/report.html" in said
    run_dir = installed.cwd / "runs" / "quickstart"
    assert read_metrics(run_dir / "metrics.jsonl")[-1]["step"] == 2
    assert (run_dir / "hf" / WEIGHTS).exists()
    assert "not a git checkout" in (run_dir / "log.txt").read_text(encoding="utf-8")
