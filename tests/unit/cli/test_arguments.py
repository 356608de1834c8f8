"""Every mistake on every command line ends it with status 2, and says the option that may have been meant."""

import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gtpo_megatron.cli import dispatch
from gtpo_megatron.cli.arguments import parse_options
from gtpo_megatron.cli.recipe import RecipeOptions, load_recipe
from launchers import local, slurm

RECIPE = "recipes.tiny_cpu:gtpo"
COMMANDS = {
    "train": [RECIPE],
    "sft": ["recipes.tiny_cpu:sft"],
    "quickstart": [],
    "examples": [],
    "config": [RECIPE],
    "plan": [RECIPE],
    "preflight": [RECIPE],
    "verify-resume": [RECIPE],
    "report": ["run"],
    "watch": ["run"],
    "status": ["run"],
    "evaluate": ["model"],
    "contamination": ["train.jsonl", "--benchmarks", "aime24"],
    "study": [],
    "convert": ["hf-to-megatron", "a", "b"],
    "completion": ["bash"],
}
TOOLS = Path(__file__).parents[3] / "tools"


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")


def complaint(capsys, call, *hints):
    """What is on stderr, without the lines that tyro draws around it."""
    try:
        status = call()
    except SystemExit as stop:
        status = stop.code
    text = capsys.readouterr().err
    assert status == 2, text
    assert "Traceback" not in text
    for hint in hints:
        assert hint in text
    return text


def test_every_command_is_here():
    assert set(COMMANDS) == set(dispatch.COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option(capsys, command):
    complaint(capsys, lambda: dispatch.run([command, *COMMANDS[command], "--no-such-option", "3"]), "--no-such-option")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["trian"], "did you mean train?"),  # codespell:ignore trian
        (["config", RECIPE, "--num-step", "3"], "--num-steps INT"),
        (["config", RECIPE, "--num_step", "3"], "--num-steps INT"),
        (["config", RECIPE, "--learning-rate", "3"], "--optimizer.learning-rate FLOAT"),
        (["config", RECIPE, "--algorthm.alpha2", "3"], "--algorithm.alpha2 FLOAT"),
        (["config", RECIPE, "--temperature", "3"], "--rollout.sampling.temperature FLOAT"),
        (["config", RECIPE, "--algorithm", "GRPO"], "did you mean GRPOConfig?"),
        (["config", RECIPE, "--algorithm", "gtpo"], "did you mean GTPOConfig?"),
        (["train", RECIPE, "--resum"], "--resume"),
        (["plan", RECIPE, "--gpu-mem", "3"], "--gpu-memory FLOAT"),
        (["evaluate", "model", "--sampels", "3"], "--samples INT"),
        (["report", "run", "--out", "x"], "--output STR"),
        (["study", "--arm", "x"], "--arms"),
        (["config", RECIPE, "--no-checkpoint.export-hf"], "--checkpoint.no-export-hf"),
    ],
)
def test_what_may_have_been_meant(capsys, arguments, meant):
    complaint(capsys, lambda: dispatch.run(arguments), meant)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["config", RECIPE, "--num-steps", "many"], "--num-steps: invalid literal for int() with base 10: 'many'"),
        (["config", RECIPE, "--num-steps", "9" * 30], "num_steps=999999999999999999999999999999: must lie between"),
        (["config", RECIPE, "--num-steps"], "Missing value for argument '--num-steps'"),
        (["config", RECIPE, "--model.dtype", "float16"], "Expected one of ('float32', 'bfloat16')"),
        (["config", RECIPE, "--rollout.sampling.temperature", "-1"], "config.rollout.sampling: temperature=-1.0"),
        (["config", RECIPE, "--algorithm.entropy-clip", "1"], "--algorithm.entropy-clip"),
        (["config", RECIPE, "--seed", "5000000000"], "seed=5000000000: must lie between 0 and 4294967295"),
        (["config", RECIPE, "--cluster.address", "host:99999"], "address='host:99999': must be host:port"),
        (["config", RECIPE, "--checkpoint.export-hf", "False"], "Unrecognized options: False"),
        (["status"], "RUN"),
        (["config", RECIPE, "more"], "more"),
        (["study", "--study", "nowhere:study"], "study 'nowhere:study': there is no module 'nowhere'"),
        (["config", RECIPE, "--reward.function", "./mine.py:f"], "there is no file ./mine.py in /"),
    ],
)
def test_a_value_that_cannot_be(capsys, arguments, message):
    complaint(capsys, lambda: dispatch.run(arguments), message)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "call",
    [
        lambda value: dispatch.run(["config", RECIPE, "--optimizer.learning-rate", value]),
        lambda value: dispatch.run(["plan", RECIPE, "--gpu-memory", value]),
        lambda value: dispatch.run(["study", "--minutes", value]),
        lambda value: dispatch.run(["evaluate", "model", "--benchmarks", "aime24", "--success-threshold", value]),
        lambda value: slurm.run([RECIPE, "--gpu-memory-gib", value, "--dry-run"]),
    ],
)
def test_no_number_is_infinite(capsys, call, value):
    complaint(capsys, lambda: call(value), f"={value}: must be")


@pytest.mark.parametrize(
    ("given", "read"), [("{}", {}), ('{"a": false, "b": [1, {"c": null}]}', {"a": False, "b": [1, {"c": None}]})]
)
@pytest.mark.parametrize("before", [{}, {"enable_thinking": True, "levels": []}])
def test_a_mapping_is_given_as_json_and_replaces_that_of_the_recipe(given, read, before):
    recipe = load_recipe(RECIPE)
    recipe = replace(recipe, data=replace(recipe.data, template_options=before))
    options = RecipeOptions(config=recipe)
    found = parse_options(RecipeOptions, ["--data.template-options", given], program="config", default=options)
    assert found.config.data.template_options == read
    same = parse_options(RecipeOptions, ["--num-steps", "3"], program="config", default=options)
    assert same.config == replace(recipe, num_steps=3)


@pytest.mark.parametrize("given", ["[1]", "{a", "true", "", '{"a": NaN}', '{"a": 1, "a": 2}', "enable_thinking=false"])
def test_what_is_no_mapping(capsys, given):
    complaint(capsys, lambda: dispatch.run(["config", RECIPE, "--data.template-options", given]), "Error parsing")


@pytest.mark.parametrize(
    "words",
    [
        ["--sinks", "tensorboard", "--sinks", "wandb", "mine:sink"],
        ["--sinks=tensorboard", "--num-steps", "3", "--sinks=wandb", "mine:sink"],
        ["--sinks", "tensorboard", "wandb", "--checkpoint.no-export-hf", "--sinks", "mine:sink"],
        ["--sinks", "--sinks", "tensorboard", "wandb", "--sinks", "mine:sink"],
    ],
)
def test_a_list_that_is_given_several_times_has_all_values(words):
    options = RecipeOptions(config=load_recipe(RECIPE))
    words = [word.replace("--sinks", "--logging.sinks") for word in words]
    found = parse_options(RecipeOptions, words, program="config", default=options)
    assert found.config.logging.sinks == ("tensorboard", "wandb", "mine:sink")
    assert found.config.num_steps == (3 if "--num-steps" in words else 40)
    assert found.config.checkpoint.export_hf == ("--checkpoint.no-export-hf" not in words)


def test_launchers_take_a_list_several_times_as_docker_does():
    """The command of docs/no_infiniband.md."""
    options = slurm.SlurmOptions(config=load_recipe(RECIPE))
    words = [word for name in ("IB_DISABLE=1", "SOCKET_NTHREADS=4") for word in ("--env", f"NCCL_{name}")]
    words += ["--sbatch=qos=high", "--nodes", "2", "--sbatch", "constraint=h100"]
    found = parse_options(slurm.SlurmOptions, words, program="slurm", default=options)
    assert found.env == ("NCCL_IB_DISABLE=1", "NCCL_SOCKET_NTHREADS=4")
    assert (found.sbatch, found.nodes) == (("qos=high", "constraint=h100"), 2)


def test_what_is_no_list_has_its_last_value():
    options = RecipeOptions(config=load_recipe(RECIPE))
    words = ["--num-steps", "3", "--checkpoint.export-hf", "--num-steps=5", "--checkpoint.no-export-hf"]
    found = parse_options(RecipeOptions, words, program="config", default=options).config
    assert (found.num_steps, found.checkpoint.export_hf) == (5, False)


@pytest.mark.parametrize("launcher", [local, slurm])
def test_the_launchers(capsys, launcher):
    complaint(capsys, lambda: launcher.run([RECIPE, "--dry-rnu"]), launcher.PROGRAM, "--dry-run")


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("convert_checkpoint.py", ["hf-to-megatron", "a", "b", "--tensor-paralel", "2"], "--tensor-parallel-size"),
        ("convert_checkpoint.py", ["hf-to-megatron", "a"], "DST"),
        ("convert_checkpoint.py", [], "hf-to-megatron, megatron-to-hf, megatron-to-peft, gguf-to-hf"),
        ("make_arithmetic.py", ["--nmu-train", "3"], "--num-train"),
        ("make_arithmetic.py", ["--seed", "x"], "--seed: "),
        ("make_tiny_model.py", ["--learning-rate", "nan"], "learning_rate=nan: must be a finite number"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_tools(capsys, monkeypatch, tool, arguments, message):
    monkeypatch.setattr(sys, "argv", [tool, *arguments])
    complaint(capsys, lambda: runpy.run_path(str(TOOLS / tool), run_name="__main__"), message)
