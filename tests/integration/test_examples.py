"""Every example runs from a copy in a folder of its own, as a stranger would have it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gtpo_megatron.cli.recipe import load_recipe, load_sft_recipe
from gtpo_megatron.run_folder.metrics_file import read_metrics
from tests.integration.runs import LEAVINGS, Run

EXAMPLES = Path(__file__).parents[2] / "examples"
SFT = "own_sft"
"""Whose recipe is of another command."""
NAMES = sorted({path.parent.name for path in EXAMPLES.glob("*/recipe.py")} - {SFT})
MAKERS = {"own_model": ("make_model.py", "my-model"), "own_adapter": ("make_adapter.py", "my-adapter")}
"""What makes the folder that a recipe names."""
ONE_PROCESS = ["--cluster.mode", "local", "--parallel.num-ranks", "1", "--parallel.tensor-parallel-size", "1"]
EACH_TIME = ("own_adapter",)
"""In make check; the others in make nightly."""
METRIC = {"own_reward": "reward/form_mean", "own_teacher": "policy/kl_teacher_nats"}


@pytest.fixture
def copied(tmp_path):
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_there_is_one_for_each_thing_of_one_s_own():
    assert NAMES == ["own_adapter", "own_algorithm", "own_data", "own_model", "own_reward", "own_teacher"]
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"examples/{name}/recipe.py:recipe" in listed for name in (*NAMES, SFT))


@pytest.mark.parametrize("name", NAMES)
def test_its_recipe_is_a_configuration(copied, monkeypatch, name):
    monkeypatch.chdir(copied)
    assert load_recipe(f"examples/{name}/recipe.py:recipe").name == name


def test_the_recipe_of_a_warm_start_is_one(copied, monkeypatch):
    monkeypatch.chdir(copied)
    assert load_sft_recipe(f"examples/{SFT}/recipe.py:recipe").name == SFT


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.timeout(600)
def test_a_warm_start_on_rows_of_one_s_own(copied):
    recipe = f"examples/{SFT}/recipe.py:recipe"
    run = Run(copied / "run", *ONE_PROCESS, recipe=recipe, num_steps=4, cwd=copied, command="sft", small=())
    run.succeed()
    rows = read_metrics(copied / "run" / "metrics.jsonl")
    assert rows[-1]["step"] == 4
    assert [row["step"] for row in rows if "sft/heldout_loss" in row] == [0, 4]
    assert (copied / "run" / "hf" / "model.safetensors").is_file()


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_gtpo_in_one_file_trains(copied):
    """Two steps, as a reader starts it; that it learns takes more."""
    command = [sys.executable, "-W", "error", "examples/gtpo_from_scratch.py", "--num-steps", "2"]
    done = subprocess.run(command, cwd=copied, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, *steps, last = done.stdout.splitlines()
    before, after = (float(re.search(r"held-out accuracy ([\d.]+)%", line)[1]) for line in (first, last))
    assert 15 < before < 35  # as before the quickstart, whose engine is another
    assert 10 < after < 45
    assert [line.split()[:2] for line in steps] == [["step", "1"], ["step", "2"]]


@pytest.mark.vllm
@pytest.mark.megatron
@pytest.mark.timeout(600)
@LEAVINGS
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in EACH_TIME else pytest.mark.nightly) for name in NAMES]
)
def test_it_trains(copied, name):
    if name in MAKERS:
        maker, folder = MAKERS[name]
        make = [sys.executable, f"examples/{name}/{maker}", folder]
        subprocess.run(make, cwd=copied, check=True, capture_output=True)
    run = Run(
        copied / "run",
        *ONE_PROCESS,
        recipe=f"examples/{name}/recipe.py:recipe",
        num_steps=2,
        cwd=copied,
    )
    run.succeed()
    assert "Traceback" not in run.output  # vLLM's, at the exit, of groups that the trainer had left before it
    last = read_metrics(copied / "run" / "metrics.jsonl")[-1]
    assert last["step"] == 2
    assert METRIC.get(name, "rollout/reward_mean") in last
    assert (copied / "run" / "hf" / "model.safetensors").exists()
